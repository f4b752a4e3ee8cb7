"""Training of DFlash drafters: for any supported target, from prompts to a checkpoint.

    texts       the target's own completions, from a finished job
    features    their taps, computed once and kept on disk up to a cap
    anchors     which blocks a step trains on
    model       the drafter, differentiable; its state is the checkpoint
    loss        cross-entropy through the target's frozen head
    start       where its weights come from
    metric      tokens per step on held-out prompts, decoded by the engine
    state       what a killed run goes on from
    loop        the training itself

Uses the engine and its files, and never Ray.
"""
