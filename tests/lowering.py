"""Matrix products in the text of a lowered program."""

import re


def products(text: str) -> tuple[list[str], list[str]]:
    """The matrix products of a program, and those among them that do not ask for the highest precision."""
    matches = re.findall(r"stablehlo\.(?:dot_general|dot|convolution)\b[^\n]*", text)
    return matches, [line for line in matches if "precision = [HIGHEST, HIGHEST]" not in line]
