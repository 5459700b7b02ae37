"""Figures of how plain the project's English is, per 1,000 words, and their budgets.

    python -m tests.tools.language      the figures, and the 40 sentences with the most hits

Texts are of three kinds: docstrings and comments, messages (texts in code of four words or more),
and pages. The references are those of Lightning Fabric, Accelerate and dask.distributed.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]

_NOUNS_AFTER_ONE = (
    "line|device|machine|process|host|command|worker|step|file|batch|example|task|replica|core|GPU|"
    "thread|key|run|job|page|launcher|table|epoch|program|idea|sentence|server|model|name|or|of the"
)
BUDGETS = {
    "what": (r"\bwhat\b", 1.0),
    "where": (r"\bwhere\b", 1.7),
    "whose, of which": (r"\b(whose|of which)\b", 0.4),
    "alone": (r"\balone\b", 0.3),
    "comes, goes": (r"\b(comes?|came|goes|went|gone)\b", 0.8),
    "one, ones as a pronoun": (rf"\bones?\b(?!-)(?! (?:{_NOUNS_AFTER_ONE})\b)", 3.0),
    "nobody, nothing": (r"\b(nobody|nothing|none|nor|neither|somebody)\b", 2.0),
    "semicolons": (r";", 3.5),
}
"""The pattern of each construction that is hard to read, and its highest figure."""

MOST_LONG_SENTENCES = 6.0
"""Highest share of sentences with more than 30 words, in percent."""

FEWEST_CONDITIONS = 5.0
"""Lowest figure of "if" and "when", the plain words for a condition."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, without code, tables and the targets of links."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = [
        line for line in text.splitlines() if not line.lstrip().startswith(("|", "#!", "http"))
    ]
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*] ", "\n".join(lines))
    return [part.strip() for part in parts if part.strip()]


def _texts_of(source: str) -> tuple[list[str], list[str]]:
    """Return the docstrings and comments of a module, and its messages."""
    prose, documented = [], set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                prose.append(text)
                documented.add(id(node.body[0].value))
    messages = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documented
        and len(node.value.split()) >= 4
        and not re.search(r"[{}<>]{2}|^\s*[./]", node.value)
    ]
    prose += [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        and not token.string.startswith(("#!", "# noqa", "# type"))
    ]
    return prose, messages


def texts() -> dict[str, list[str]]:
    """Return the texts of each kind."""
    pairs = [_texts_of(file.read_text()) for file in sorted((ROOT / "tfdist").rglob("*.py"))]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("launch/**/*.md")]
    return {
        "docstrings": [text for prose, _ in pairs for text in prose],
        "messages": [text for _, messages in pairs for text in messages],
        "pages": [page.read_text() for page in pages if page.name != "CHANGELOG.md"],
    }


def figures(of: list[str]) -> dict[str, float]:
    """Return the figure of each construction, of long sentences and of conditions."""
    parts = sentences("\n\n".join(of))
    words = sum(len(part.split()) for part in parts)

    def rate(pattern: str) -> float:
        return 1000 * sum(len(re.findall(pattern, part, re.IGNORECASE)) for part in parts) / words

    found = {name: rate(pattern) for name, (pattern, _) in BUDGETS.items()}
    found["long sentences"] = 100 * sum(len(part.split()) > 30 for part in parts) / len(parts)
    found["conditions"] = rate(r"\b(if|when)\b")
    return found


def over_budget(found: dict[str, float]) -> list[str]:
    """Return the names of the figures that miss their budget."""
    names = [name for name, (_, most) in BUDGETS.items() if found[name] > most]
    names += ["long sentences"] * (found["long sentences"] > MOST_LONG_SENTENCES)
    return names + ["conditions"] * (found["conditions"] < FEWEST_CONDITIONS)


def main() -> None:
    """Print the figures of each kind, and the sentences with the most hits."""
    scored = []
    for kind, some in texts().items():
        found = figures(some)
        print(f"{kind}:", ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
        print(f"  over budget: {', '.join(over_budget(found)) or '(all within)'}")
        for part in sentences("\n\n".join(some)):
            patterns = [pattern for pattern, _ in BUDGETS.values()]
            hits = sum(len(re.findall(pattern, part, re.IGNORECASE)) for pattern in patterns)
            scored.append((hits + len(part.split()) / 25, kind, " ".join(part.split())[:200]))
    for score, kind, part in sorted(scored, reverse=True)[:40]:
        print(f"{score:5.1f} {kind}: {part}")


if __name__ == "__main__":
    main()
