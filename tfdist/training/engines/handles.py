"""Which variable an operation is on, within functions within functions."""

from __future__ import annotations

from typing import Any


def outermost(handle: Any) -> Any:
    """The variable's own handle behind one, which each function has captured anew."""
    graph = getattr(handle, "graph", None)
    while graph is not None and hasattr(graph, "captures"):
        handle = next((outer for outer, inner in graph.captures if inner is handle), handle)
        graph = graph.outer_graph
    return handle
