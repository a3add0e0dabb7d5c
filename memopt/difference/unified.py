"""Two aligned graphs as a unified diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memopt.difference.graph_diff import Alignment


def unified(alignment: Alignment, before: str, after: str, context: int = 3) -> str:
    """The graphs as a unified diff under the given titles; an empty string when they are equal.

    Nodes of the second graph are called as their partners in the first, so that only what differs is shown.
    """
    names = _common_names(alignment)
    old = [node.line() for node in alignment.before]
    new = [node.line(names) for node in alignment.after]
    lines = list(_marked(alignment, old, new))
    kept = [index for index, (mark, _) in enumerate(lines) if mark != " "]
    if not kept:
        return ""
    shown = [f"--- {before}", f"+++ {after}"]
    starts: list[list[int]] = []
    for index in kept:
        first, last = max(0, index - context), min(len(lines), index + context + 1)
        if starts and first <= starts[-1][1]:
            starts[-1][1] = last
        else:
            starts.append([first, last])
    counted = [(0, 0)]
    for mark, _ in lines:
        counted.append((counted[-1][0] + (mark != "+"), counted[-1][1] + (mark != "-")))
    for first, last in starts:
        (a, b), (c, d) = counted[first], counted[last]
        shown.append(f"@@ -{_range(a, c)} +{_range(b, d)} @@")
        shown += [mark + text for mark, text in lines[first:last]]
    return "\n".join(shown) + "\n"


def _range(start: int, end: int) -> str:
    return f"{start + (end > start)},{end - start}"


def _marked(alignment: Alignment, old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every line with its mark: what is unmarked or "-" is the first graph in order, unmarked or "+" the second."""
    kept = {row.before for row in alignment.rows if row.kind == "same"}
    place = 0
    added: list[tuple[str, str]] = []
    for row in alignment.rows:
        if row.kind == "same":
            assert row.before is not None
            yield from (("-", old[a]) for a in range(place, row.before) if a not in kept)
            yield from added
            yield " ", old[row.before]
            place, added = row.before + 1, []
        elif row.after is not None:
            added.append(("+", new[row.after]))
    yield from (("-", old[a]) for a in range(place, len(old)))
    yield from added


def _common_names(alignment: Alignment) -> dict[str, str]:
    """Names for the nodes of the second graph: a partner's where there is one, its own or a fresh one otherwise."""
    taken = {node.name for node in alignment.before}
    names = {}
    for row in alignment.rows:
        if row.after is None:
            continue
        name = alignment.after[row.after].name
        if row.before is not None:
            names[name] = alignment.before[row.before].name
            continue
        fresh = name
        while fresh in taken:
            fresh += "'"
        taken.add(fresh)
        names[name] = fresh
    return names
