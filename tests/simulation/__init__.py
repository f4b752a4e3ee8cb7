"""A whole job in one process, on a simulated clock: real coordinator, workers and commit code.

world.py      the clock, and processes that run one at a time and may die at any pause
watched.py    a store in memory whose promises are checked after every change
storage.py    a process's way to that store, on which things go wrong
post.py       messages between processes: late, lost, out of order
cluster.py    a driver and its workers
accidents.py  what befalls them
settings.py   what one schedule is made of, drawn at random
schedules.py  one run of a job, all of it from a seed
sabotage.py   bugs that the checks must find
"""
