"""The pictures of communication.md: who has which block, what moves, and how much: `main()` -> docs/pictures/split-*.svg."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

OUT = Path(__file__).resolve().parent / "pictures"
RANKS = ("#3b6fb6", "#e08a2e", "#4f9d5d", "#b5507c", "#7a6bb0", "#8c6d46", "#3f9fa5", "#9aa53b")
GREY, PALE, INK = "#5b6770", "#c3c9cf", "#2f363c"
WIDTH = 4096  # of the layer in the picture of volumes
POWERS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
plt.rcParams |= {"font.size": 9, "svg.hashsalt": "soli", "svg.fonttype": "none"}


def main() -> None:
    """Draw all of them."""
    OUT.mkdir(exist_ok=True)
    pictures = {
        "1d": one_d, "2d": two_d, "25d": two_and_a_half_d, "3d": three_d, "volume": volume, "ring": ring,
        "double-ring": double_ring, "zigzag": zigzag, "ulysses": ulysses, "scores": scores, "pipeline": pipeline,
    }  # fmt: skip
    for name, picture in pictures.items():
        figure = picture()
        figure.savefig(OUT / f"split-{name}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
        print(f"docs/pictures/split-{name}.svg")


# --- pieces of a picture ----------------------------------------------------------------------------------


def canvas(width: float, x: tuple[float, float], y: tuple[float, float]) -> Axes:
    """Of a unit that is as high as it is wide, y downwards."""
    _, axes = plt.subplots(figsize=(width, width * (y[1] - y[0]) / (x[1] - x[0])))
    axes.set(xlim=x, ylim=(y[1], y[0]))
    axes.set_position((0, 0, 1, 1))
    axes.axis("off")
    return axes


def cell(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    text: str = "",
    size: float = 8,
    edge: str = "white",
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=1.2))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=size)


def blocks(
    axes: Axes,
    at: tuple[float, float],
    size: tuple[float, float],
    owners: list[list[int]],
    names: list[list[str]] | None = None,
    title: str = "",
) -> None:
    """A matrix of equal blocks, each in the colour of its rank."""
    (x, y), (width, height) = at, size
    high, wide = height / len(owners), width / len(owners[0])
    for i, row in enumerate(owners):
        for j, rank in enumerate(row):
            name = names[i][j] if names else str(rank)
            cell(axes, x + j * wide, y + i * high, wide, high, RANKS[rank], name)
    note(axes, x + width / 2, y - 0.25, title)


def note(axes: Axes, x: float, y: float, text: str, colour: str = INK, size: float = 8, **more: str) -> None:
    axes.text(x, y, text, **{"ha": "center", "va": "center", **more}, color=colour, fontsize=size)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


# --- tensor parallelism -------------------------------------------------------------------------------------


def one_d() -> plt.Figure:
    """A column and the row that reads it, on two ranks."""
    axes = canvas(8, (0, 20.2), (-0.8, 4.6))
    cell(axes, 0, 0, 2.6, 2.2, GREY, "both ranks")
    note(axes, 1.3, -0.3, "x[T, K]")
    blocks(axes, (3.5, 0), (2.8, 2.2), [[0, 1]], title="a column: W[N_C, K]")
    blocks(axes, (7.2, 0), (2.8, 2.2), [[0, 1]], title="h[T, N_C]")
    blocks(axes, (10.9, 0), (2.2, 2.2), [[0], [1]], title="a row: V[K, N_C]")
    cell(axes, 14.5, 0.5, 1.9, 1.7, RANKS[1])
    cell(axes, 14.0, 0, 1.9, 1.7, RANKS[0], "0")
    note(axes, 16.15, 1.95, "1", "white")
    note(axes, 15.2, -0.3, "{y_C}: a part each")
    cell(axes, 17.6, 0, 2.6, 2.2, GREY, "both ranks")
    note(axes, 18.9, -0.3, "y[T, K]")
    for x, sign in ((3.05, "·"), (6.75, "="), (10.45, "·"), (13.6, "=")):
        note(axes, x, 1.1, sign, size=12)
    arrow(axes, (16.5, 1.1), (17.5, 1.1))
    note(axes, 1.3, 2.8, "backward: dx is a sum,\nall-reduce over tp")
    note(axes, 8.6, 2.8, "nothing moves")
    note(axes, 17.0, 2.8, "forward:\nall-reduce over tp")
    note(axes, 10.1, 4.2, "sp=on: x and y are cut along the sequence; all-gather where x is read, "
         "reduce-scatter where y is summed, and the reverse backward", GREY)  # fmt: skip
    return axes.figure


def grid_of(title: str, axes: Axes, at: tuple[float, float], size: float = 2.4, first: int = 0) -> None:
    owners = [[first, first + 1], [first + 2, first + 3]]
    blocks(axes, at, (size, size), owners, [["0,0", "0,1"], ["1,0", "1,1"]], title)


def two_d() -> plt.Figure:
    """SUMMA on 2 x 2 ranks: the first panel of K."""
    axes = canvas(7, (-0.6, 13.8), (-0.9, 5.0))
    for x, title in ((0, "x[T_R, K_C]"), (4.4, "W[N_C, K_R], turned"), (9.4, "y[T_R, N_C]")):
        grid_of(title, axes, (x, 0.2))
    for x, sign in ((3.6, "·"), (8.3, "=")):
        note(axes, x, 1.4, sign, size=12)
    for y in (0.55, 1.75):
        arrow(axes, (1.05, y + 0.5), (1.75, y + 0.5), "white")
    for x in (4.7, 5.9):
        arrow(axes, (x + 0.75, 1.15), (x + 0.75, 1.8), "white")
    axes.add_patch(Rectangle((0, 0.2), 1.2, 2.4, fill=False, edgecolor=INK, linewidth=2))
    axes.add_patch(Rectangle((4.4, 0.2), 2.4, 1.2, fill=False, edgecolor=INK, linewidth=2))
    note(axes, 1.2, 3.1, "panel 0 of x: broadcast\nover tp, the ranks of a row")
    note(axes, 5.6, 3.1, "panel 0 of W: broadcast over\nrow, the ranks of a column")
    note(axes, 10.6, 3.1, "y += panel · panel;\ny stays where it is")
    note(axes, 6.6, 4.2, "then panel 1. Backward: dx's panel is reduced over tp to its owner (W's is broadcast again),\n"
         "dW's is reduced over row to its owner (x's is broadcast again). Blocks are named row, column.", GREY)  # fmt: skip
    return axes.figure


def two_and_a_half_d() -> plt.Figure:
    """Two copies of a grid of 2 x 2."""
    axes = canvas(7, (-3.0, 12.4), (-0.9, 7.6))
    for copy, y in ((0, 0.2), (1, 3.9)):
        note(axes, -1.7, y + 1.2, f"copy {copy}:\nhalf of the rows\nof the batch")
        for x, title in ((0, "x[T_DR, K_C]"), (4.2, "W[N_C, K_R], turned"), (8.6, "y[T_DR, N_C]")):
            grid_of(title if not copy else "", axes, (x, y), first=4 * copy)
        for x, sign in ((3.3, "·"), (7.6, "=")):
            note(axes, x, y + 1.2, sign, size=12)
    axes.annotate("", xy=(5.4, 3.85), xytext=(5.4, 2.65), arrowprops={"arrowstyle": "<|-|>", "color": INK})
    note(axes, 5.7, 3.25, "the same values: gradients are summed over the copies, once a step", ha="left")
    note(axes, 4.7, 7.1, "inside a copy: SUMMA, as in 2D", GREY)
    return axes.figure


def three_d() -> plt.Figure:
    """Blocks of one product on 2 x 2 x 2 ranks, named depth, row, column."""
    axes = canvas(8, (-0.4, 16.6), (-0.9, 6.2))
    rank = lambda d, r, c: 4 * d + 2 * r + c
    name = lambda d, r, c: f"{d}{r}{c}"
    two = (0, 1)
    for at, size, title, places in (
        ((0, 0.2), (2.4, 4), "x[T_DC, K_R]", [[(d, r, c) for r in two] for d in two for c in two]),
        ((4.6, 1.0), (4.8, 2.4), "W[N_CD, K_R], turned", [[(d, r, c) for c in two for d in two] for r in two]),
        ((11.4, 0.2), (2.4, 4), "y[T_DR, N_C]", [[(d, r, c) for c in two] for d in two for r in two]),
    ):  # fmt: skip
        owners = [[rank(*place) for place in row] for row in places]
        blocks(axes, at, size, owners, [[name(*place) for place in row] for row in places], title)
    for x, sign in ((3.5, "·"), (10.4, "=")):
        note(axes, x, 2.2, sign, size=12)
    note(axes, 1.2, 4.75, "all-gather over tp:\nT_D of tokens, K_R")
    note(axes, 7.0, 4.75, "all-gather over depth:\nN_C, K_R")
    note(axes, 12.6, 4.75, "reduce-scatter over row\nof {T_D, N_C}")
    note(axes, 8.1, 5.8, "Blocks are named depth, row, column. y's axes have changed places: the next product gathers over "
         "row, scatters over tp.", GREY)  # fmt: skip
    for y, text in ((1.2, "depth 0"), (3.2, "depth 1")):
        note(axes, 14.0, y, text + "'s rows\nof the batch", GREY, ha="left")
    return axes.figure


def volumes(tokens: float) -> dict[str, list[tuple[int, float]]]:
    """Elements that one layer of a GPT moves, forward and backward, all ranks together: by kind, over ranks."""
    x, w = (9 * tokens * WIDTH, 12 * WIDTH**2)  # q, k, v apart: inputs of products (outputs are as many), weights
    found: dict[str, list[tuple[int, float]]] = {
        "1d, with or without sp": [(p, 8 * (p - 1) * tokens * WIDTH) for p in POWERS],
        "2d": [(q * q, 3 * (q - 1) * (x + w)) for q in range(2, 23)],
        "2.5d, depth=2": [(2 * q * q, 3 * (q - 1) * (x + 2 * w) + 2 * w) for q in range(2, 17)],
        "3d": [(q**3, (q - 1) * (5 * x + 3 * w)) for q in range(2, 9)],
        "dp": [(p, 2 * (p - 1) * w) for p in POWERS],
        "dp, zero=3": [(p, 3 * (p - 1) * w) for p in POWERS],
    }
    return found


def volume() -> plt.Figure:
    """Total volume of a layer against ranks, for few and for many tokens."""
    styles = {
        "1d, with or without sp": (RANKS[0], "-", ""), "2d": (RANKS[1], "-", "o"), "2.5d, depth=2": (RANKS[2], "-", "s"),
        "3d": (RANKS[3], "-", "D"), "dp": (GREY, "--", ""), "dp, zero=3": (PALE, "--", ""),
    }  # fmt: skip
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 3.4), sharey=True)
    for axes, tokens in zip(panels, (2048, 65536), strict=True):
        for kind, points in volumes(tokens).items():
            colour, line, mark = styles[kind]
            ranks, elements = zip(*points, strict=True)
            axes.loglog(
                ranks, [e / 1e9 for e in elements], line, color=colour, marker=mark or None,
                markersize=3, linewidth=1.3, label=kind,
            )  # fmt: skip
        axes.set_title(f"T = {tokens:,} tokens, H = {WIDTH:,}", fontsize=9)
        axes.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("ranks", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("10⁹ elements a layer, all ranks", fontsize=8)
    panels[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


# --- context parallelism ------------------------------------------------------------------------------------


def turns(axes: Axes, at: tuple[float, float], owner: list[list[int]], says: list[str]) -> None:
    """Whose keys and values each of four ranks has, turn by turn."""
    x, y = at
    for rank in range(4):
        note(axes, x + 2 * rank + 0.8, y - 0.9, f"rank {rank}")
        cell(axes, x + 2 * rank, y - 0.65, 1.6, 0.5, RANKS[rank], f"Q {rank}")
    for turn, row in enumerate(owner):
        note(axes, x - 0.3, y + 0.95 * turn + 0.35, says[turn], ha="right")
        for rank, of in enumerate(row):
            cell(axes, x + 2 * rank, y + 0.95 * turn + 0.1, 1.6, 0.5, RANKS[of], f"K, V {of}")


def ring() -> plt.Figure:
    """Four ranks: keys and values go round, queries stay."""
    axes = canvas(6.6, (-2.2, 11.6), (-1.2, 5.4))
    says = ["its own", "1 exchange", "2 exchanges", "3 = p - 1"]
    turns(axes, (0, 0), [[(rank - turn) % 4 for rank in range(4)] for turn in range(4)], says)
    for turn in range(3):
        for rank in range(3):
            arrow(axes, (2 * rank + 1.2, 0.95 * turn + 0.62), (2 * rank + 2.5, 0.95 * turn + 1.03))
        arrow(axes, (7.2, 0.95 * turn + 0.62), (8.3, 0.95 * turn + 0.95))
    note(axes, 8.4, 2.0, "to rank 0", GREY, ha="left")
    note(axes, 3.8, 4.2, "backward: the same once more, and one turn behind each block the sum of its\n"
         "dK, dV, which ends at its owner: p - 1 exchanges too", GREY)  # fmt: skip
    return axes.figure


def double_ring() -> plt.Figure:
    """Two inner rings of two ranks."""
    axes = canvas(6.6, (-3.4, 10.6), (-1.9, 5.3))
    owner = [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
    says = ["round 0, turn 0", "turn 1", "round 1, turn 0", "turn 1"]
    turns(axes, (0, 0), owner, says)
    for x, text in ((1.8, "host a: inner ring 0"), (5.8, "host b: inner ring 1")):
        note(axes, x, -1.5, text)
    for turn in (0, 2):
        for rank in (0, 2):
            ends = (2 * rank + 1.2, 0.95 * turn + 0.62), (2 * rank + 2.4, 0.95 * turn + 1.03)
            style = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.1}
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=style)
    axes.plot([-0.1, 7.7], [1.92, 1.92], color=GREY, linewidth=0.8, linestyle="--")
    note(axes, 7.8, 0.85, "inside a host:\nw - 1 a round", GREY, ha="left")
    note(axes, 7.8, 1.92, "between hosts: once\na round, under way\nsince its begin", GREY, ha="left")
    note(axes, 3.8, 4.4, "o rounds of w turns: o (w - 1) exchanges inside, o - 1 between: p - 1 in all", GREY)
    return axes.figure


def zigzag() -> plt.Figure:
    """Pairs of queries and keys under causality, by rank: contiguous and in zigzag."""
    axes = canvas(7, (-0.6, 20.6), (-1.4, 9.8))
    contiguous = [0, 0, 1, 1, 2, 2, 3, 3]
    folded = [0, 1, 2, 3, 3, 2, 1, 0]
    for x, owners, title in ((0, contiguous, "contiguous (Ulysses, scores)"), (11, folded, "zigzag (ring)")):
        work = [0] * 4
        for i, rank in enumerate(owners):
            for j in range(i + 1):
                cell(axes, x + j, i, 1, 1, RANKS[rank] if j < i else RANKS[rank] + "99", "")
            work[rank] += 2 * i + 1
            note(axes, x - 0.4, i + 0.5, str(rank))
        note(axes, x + 4, -0.7, title, size=9)
        note(axes, x + 4, 8.6, "work of ranks 0 to 3: " + ", ".join(map(str, work)), size=8)
    note(
        axes, 10, 9.5, "rows: 8 pieces of queries with their rank; columns: keys; a piece with itself counts half", GREY
    )
    return axes.figure


def ulysses() -> plt.Figure:
    """Six heads of queries and three of keys on four ranks."""
    axes = canvas(7.4, (-1.4, 15.4), (-1.0, 8.0))
    sizes, reads = (2, 2, 1, 1), (("0", "1"), ("2", "3"), ("4",), ("5",))
    keys = ("0", "1", "2", "2")
    for x, title in ((0, "before: its positions, all heads"), (8.6, "in attention: all positions, its heads")):
        note(axes, x + 3, -0.6, title)
    for rank in range(4):
        cell(axes, 1.5 * rank, 0, 1.5, 4.2, RANKS[rank], f"rank {rank}")
        cell(axes, 1.5 * rank, 4.8, 1.5, 1.8, RANKS[rank], f"rank {rank}")
    at, below = 0.0, 4.8
    for rank, size in enumerate(sizes):
        cell(axes, 8.6, at, 6, 0.7 * size, RANKS[rank], f"rank {rank}: heads {', '.join(reads[rank])}" if size > 1
             else f"rank {rank}: head {reads[rank][0]}")  # fmt: skip
        cell(axes, 8.6, below, 6, 0.45, RANKS[rank], f"rank {rank}: key head {keys[rank]}")
        at, below = at + 0.7 * size, below + 0.45
    for y, text in ((2.1, "Q, 6 heads"), (5.7, "K, V,\n3 heads")):
        note(axes, -0.2, y, text, ha="right")
        arrow(axes, (6.4, y), (8.2, y))
        note(axes, 7.3, y - 0.35, "all-to-all")
    note(axes, 7.0, 7.4, "O goes back the same way as Q. Key head 2 is read by heads 4 and 5 and goes to two ranks;\n"
         "backward its two gradients are added up.", GREY)  # fmt: skip
    return axes.figure


def scores() -> plt.Figure:
    """Ring self-attention: rows of scores fill, column by column, as keys come by; then values."""
    axes = canvas(7.4, (-1.9, 16.6), (-1.3, 6.4))
    for rank in range(4):
        note(axes, -0.2, rank + 0.5, f"rank {rank}", ha="right")
        cell(axes, 0, rank, 1.2, 1, RANKS[rank], "Q")
        cell(axes, 14.4, rank, 1.2, 1, RANKS[rank], "O")
        for j in range(4):
            cell(axes, 2.6 + j, rank, 1, 1, RANKS[rank], f"{(rank - j) % 4}")
            cell(axes, 8.2 + j, rank, 1, 1, RANKS[rank], f"{(rank - j) % 4}")
    note(axes, 4.6, -0.5, "scores[L_C, L]: columns of K's owner,\nby the turn that fills them")
    note(axes, 10.2, -0.5, "softmax(scores)[L_C, L]:\nturn at which V comes by")
    note(axes, 1.9, 2, "· K =", size=9)
    note(axes, 7.4, 2, "→", size=12)
    note(axes, 13.3, 2, "· V =", size=9)
    note(axes, 4.6, 4.7, "RingQK: K goes round,\np - 1 exchanges")
    note(axes, 10.2, 4.7, "RingAV: V goes round,\np - 1 exchanges")
    note(
        axes, 7.6, 5.9, "backward: V, then K, go round again; dV and dK go round as sums and end at their owners", GREY
    )
    return axes.figure


def pipeline() -> plt.Figure:
    """Three stages, three microbatches: what crosses borders."""
    axes = canvas(6.6, (-2.0, 13.2), (-0.9, 4.9))
    for stage in range(3):
        note(axes, -0.2, 1.3 * stage + 0.4, f"stage {stage}", ha="right")
        for micro in range(3):
            cell(axes, stage + micro + 0.05, 1.3 * stage, 0.9, 0.8, RANKS[0], f"F{micro}")
            cell(axes, 6.8 + (2 - stage) + micro + 0.05, 1.3 * stage, 0.9, 0.8, RANKS[1], f"B{micro}")
            if stage < 2:
                arrow(axes, (stage + micro + 0.7, 1.3 * stage + 0.8), (stage + micro + 1.3, 1.3 * stage + 1.28))
                arrow(
                    axes,
                    (9.3 - stage - 1 + micro - 0.2, 1.3 * stage + 1.3),
                    (9.3 - stage + micro - 0.4, 1.3 * stage + 0.82),
                )
    note(axes, 2.5, -0.5, "forward: activations[B/M, S, H] down")
    note(axes, 9.3, -0.5, "backward: their gradients up")
    note(
        axes,
        5.6,
        4.5,
        "each border, each microbatch: once down, once up; B S H of elements a step each way (gpipe's order)",
        GREY,
    )
    return axes.figure


if __name__ == "__main__":
    main()
