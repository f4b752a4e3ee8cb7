"""What a job's steps look like: tokens per step, budget, acceptance, and where the time goes.

    marimo edit notebooks/quickstart.py                        look, and change what is drawn
    python notebooks/quickstart.py -- --save out/pictures      draw without a browser

The output is `out/quickstart`, or what is given as `-- --output DIRECTORY`.
"""

import marimo

app = marimo.App(width="medium")

with app.setup:
    from pathlib import Path

    import marimo as mo
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset
    from matplotlib.figure import Figure

    import bastion_batch

    if mo.app_meta().mode == "script":
        mpl.use("agg")
    STAGES = ("prefill", "draft", "build", "verify", "commit", "other")


@app.cell
def _():
    arguments = mo.cli_args()
    output_path = mo.ui.text(
        value=str(arguments.get("output") or "out/quickstart"),
        label="Output directory",
        full_width=True,
    )
    output_path
    return arguments, output_path


@app.cell
def _(output_path):
    output = Path(output_path.value)
    mo.stop(
        not (output / "data").is_dir(),
        mo.md(f"**{output}** is not the output of a job. Run `make demo` first."),
    )
    data = pyarrow.dataset.dataset(output / "data", format="parquet").to_table()
    rows = bastion_batch.load_steps(output)
    steps = bastion_batch.load_steps(output, deduplicate=True)
    drafted = rows.filter(pc.greater(rows["num_nodes"], 0))
    return data, drafted, output, rows, steps


@app.cell
def _(data, output, rows):
    _decoding = rows.filter(pc.not_equal(rows["method"], "prefill"))
    _per_step = pc.mean(_decoding["num_committed"]).as_py()
    mo.md(f"""
    # {output.name}

    {data.num_rows:,} completions, {pc.sum(data["num_output_tokens"]).as_py() or 0:,} tokens;
    {_decoding.num_rows:,} (step, row) records, {f"{_per_step:.2f}" if _per_step else "no"} tokens
    per step.
    """)
    return


@app.function
def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those around it, shorter at the ends."""
    window = max(1, min(window, len(values)))
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")


@app.function
def draw_tokens_per_step(rows: pa.Table) -> Figure:
    """Tokens that each engine step committed per live row, as the job went on."""
    decoding = rows.filter(pc.not_equal(rows["method"], "prefill"))
    per_step = (
        decoding.group_by(["worker", "attempt", "step"])
        .aggregate([("num_committed", "mean")])
        .sort_by([("worker", "ascending"), ("attempt", "ascending"), ("step", "ascending")])
    )
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    for worker in pc.unique(per_step["worker"]).to_pylist():
        tokens = per_step.filter(pc.equal(per_step["worker"], worker))["num_committed_mean"]
        values = tokens.to_numpy()
        axes.plot(values, ".", markersize=2, alpha=0.25, color="tab:gray")
        axes.plot(rolling_mean(values, 50), label=worker)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step of the worker", ylabel="tokens per row", title="Tokens per step")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    return figure


@app.function
def draw_budget(steps: pa.Table) -> Figure:
    """Nodes that the controller bought in each step, and the rows that shared them."""
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    batch = axes.twinx()
    for worker in pc.unique(steps["worker"]).to_pylist():
        own = steps.filter(pc.equal(steps["worker"], worker))
        axes.plot(own["budget_nodes"].to_numpy(), linewidth=0.8, label=worker)
        batch.plot(own["batch_size"].to_numpy(), color="tab:orange", linewidth=1, linestyle="--")
    axes.set(xlabel="step of the worker", ylabel="drafted nodes", title="Budget of a step")
    batch.set_ylabel("live rows (dashed)")
    axes.set_ylim(bottom=0)
    batch.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    return figure


@app.function
def draw_acceptance(drafted: pa.Table) -> Figure:
    """How deep drafts are accepted, and whether the controller expected it."""
    accepted = drafted["num_accepted"].to_numpy()
    tree_depth = drafted["tree_depth"].to_numpy()
    depths = np.arange(1, (tree_depth.max() if len(tree_depth) else 0) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    shares = [
        (accepted[tree_depth >= depth] >= depth).mean() if (tree_depth >= depth).any() else np.nan
        for depth in depths
    ]
    left.bar(depths, shares)
    left.set(xlabel="depth", ylabel="share accepted to it", title="Trees at least so deep")
    left.set_ylim(0, 1)
    expected = drafted["expected_tokens"].to_numpy()
    for group in np.array_split(np.argsort(expected), 12):
        if len(group):
            right.plot(expected[group].mean(), accepted[group].mean() + 1, "o", color="tab:blue")
    limit = float(depths[-1]) + 1 if len(depths) else 2.0
    right.plot([1, limit], [1, limit], color="black", linewidth=0.8, linestyle=":")
    right.set(xlabel="expected tokens", ylabel="tokens found", title="Twelve groups of steps")
    return figure


@app.function
def draw_time(steps: pa.Table) -> Figure:
    """Where the steps' time goes. The stages sum to the steps."""
    figure, axes = plt.subplots(figsize=(8, 2), layout="constrained")
    seconds = [float(pc.sum(steps[f"{stage}_seconds"]).as_py() or 0) for stage in STAGES]
    left = 0.0
    for stage, value in zip(STAGES, seconds, strict=True):
        axes.barh([0], [value], left=[left], label=stage)
        left += value
    axes.set(xlabel="seconds, over all workers", yticks=[], title="Time by stage")
    figure.legend(ncols=len(STAGES), loc="outside lower center")
    return figure


@app.cell
def _(drafted, rows, steps):
    pictures = {
        "tokens_per_step": draw_tokens_per_step(rows),
        "budget": draw_budget(steps),
        "acceptance": draw_acceptance(drafted),
        "time": draw_time(steps),
    }
    mo.vstack(list(pictures.values()))
    return (pictures,)


@app.cell
def _(arguments, pictures):
    if arguments.get("save"):
        _directory = Path(str(arguments.get("save")))
        _directory.mkdir(parents=True, exist_ok=True)
        for _name, _figure in pictures.items():
            _figure.savefig(_directory / f"{_name}.png", dpi=120)
    return


@app.cell
def _(data):
    mo.stop("kind" not in data.column_names)
    mo.vstack(
        [
            mo.md("## By kind of prompt"),
            mo.ui.table(
                data.group_by("kind")
                .aggregate(
                    [
                        ("row_id", "count"),
                        ("num_output_tokens", "mean"),
                        ("tokens_per_step", "mean"),
                    ]
                )
                .sort_by([("tokens_per_step_mean", "descending")])
            ),
        ]
    )
    return


@app.cell
def _(data):
    _shown = [n for n in ("row_id", "prompt", "output", "finish_reason") if n in data.column_names]
    mo.ui.table(data.select(_shown))
    return


if __name__ == "__main__":
    app.run()
