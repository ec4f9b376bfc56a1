"""Formulas as MathML, converted while the site is built: pages need neither a script nor a network to show them."""

import html
import re
from typing import Any

from math_core import LatexToMathML

MACROS = {
    "E": r"\mathbb{E}",
    "R": r"\mathbb{R}",
    "T": r"\top",
    "d": r"\mathrm{d}",
    "Q": r"Q_{\!\star}",
    "tr": r"\operatorname{tr}",
    "softmax": r"\operatorname{softmax}",
    "prox": r"\operatorname{prox}",
    "loss": r"\ell",
    "hq": r"\hat{q}",
    "hV": r"\hat{V}",
    "hm": r"\hat{m}",
    "hth": r"\hat{\theta}",
}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """A page's formulas; one that cannot be read ends the build."""
    convert = LatexToMathML(macros=MACROS)

    def mathml(found: re.Match[str]) -> str:
        tag, bracket, formula = found.groups()
        shown = convert.convert_with_local_state(html.unescape(formula), displaystyle=bracket == "[")
        return f'<{tag} class="formula">{shown}</{tag}>'

    return FORMULA.sub(mathml, content)
