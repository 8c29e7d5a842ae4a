"""How hard a page of Markdown is to read: its blocks of prose, their lengths, and its grade by Flesch and Kincaid.

`python tests/support/reading.py PAGE...` prints a line for each page, and its longest sentence and block.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
CODE = re.compile(r"`[^`]+`")
WORD = re.compile(r"[(\"'*_“‘]*([A-Za-zé][A-Za-zé’'-]*[A-Za-zé]|[aI])[.,;:!?)\"'*_”’…]*")
ABBREVIATION = re.compile(r"\b(Eqs?|et al|vs|e\.g|i\.e)\.")
SILENT = re.compile(r"""(?<=[^laeiouy])e$ | (?<=[aeiou]l)e$    # name, while; but not table
                    | (?<=[^tdaeiouy])e(?=d$)                # used; but not wanted
                    | (?<=[^cghsxzaeiouy])e(?=s$)            # files; but not pages
                    | (?<=..[^laeiouy])e(?=(?:ful|less|ly|ment|ness)$)  # completely""", re.VERBOSE)


def blocks(text: str) -> list[str]:
    """Paragraphs and list items, each on one line, without code, formulas apart, tables, headings and pictures."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)(?:\{[^}]*\})?", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    found: list[str] = []
    fresh, listed = True, False
    for line in text.splitlines():
        formula = line.startswith("    ") and fresh and not listed
        if not line.strip() or line.startswith(("#", "|", "!!!")) or formula:
            fresh = True
            continue
        if fresh or ITEM.match(line):
            listed = bool(ITEM.match(line)) or (listed and line.startswith(" "))
            found.append(ITEM.sub("", line).strip())
        else:
            found[-1] += f" {line.strip()}"
        fresh = False
    return found


def words(text: str) -> list[str]:
    """The words of the language: numbers, symbols and formulas are none, and a piece of code is one short word."""
    parts = [WORD.fullmatch(part) for part in re.sub(r"[—–/]", " ", CODE.sub("code", text)).split()]
    return [part[1] for part in parts if part]


def length(block: str) -> int:
    """How many words and numbers; a piece of code is one, and a sign between two spaces none."""
    return sum(any(letter.isalnum() for letter in part) for part in CODE.sub("code", block).split())


def sentences(block: str) -> list[str]:
    """A block's sentences; its end ends one, whatever mark stands there."""
    text = ABBREVIATION.sub(r"\1", CODE.sub("code", block))
    return [part for part in re.split(r"(?<=[.!?])[)\"'*_’”]*(?:\s+|$)", text) if words(part)]


def syllables(word: str) -> int:
    """Groups of vowels, without the silent ones at the end."""
    parts = [SILENT.sub("", part) for part in re.split(r"-|[’'].*$", word.lower()) if part]
    return sum(max(1, len(re.findall(r"[aeiouyé]+", part))) for part in parts)


def mostly_figures(block: str) -> bool:
    """Over a third of it is numbers and formulas."""
    return len(words(block)) < 2 / 3 * len(CODE.sub("code", block).split())


def grade(text: str) -> float:
    """Years of school that the prose asks for (Kincaid et al. 1975), without blocks that are mostly figures."""
    prose = [block for block in blocks(text) if not mostly_figures(block)]
    counted = [words(sentence) for block in prose for sentence in sentences(block)]
    flat = [word for sentence in counted for word in sentence]
    return 0.39 * len(flat) / len(counted) + 11.8 * sum(map(syllables, flat)) / len(flat) - 15.59 if flat else 0.0


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name).read_text(encoding="utf-8")
        longest = max(blocks(page), key=length, default="")
        sentence = max((each for block in blocks(page) for each in sentences(block)), key=length, default="")
        print(f"{name}: grade {grade(page):.1f}; longest block {length(longest)} words, sentence {length(sentence)}")
