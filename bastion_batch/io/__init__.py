"""Files in and out: sources, plan, prompts, tables, commit. Knows neither torch nor Ray."""
