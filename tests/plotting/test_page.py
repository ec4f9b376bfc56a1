"""A diagram as a page of HTML: its data are those of the table, and its script runs, in a JavaScript engine if any."""

import json
import re
import shutil
import subprocess

import jax
import made
import numpy as np
import pytest
from made import point

import tiedattn_jax as ta
from tiedattn_jax.plotting.page import diagram_page

# Enough of a browser for the script of the page: elements that know their attributes, children and listeners.
BROWSER = """
const fs = require("fs"), page = fs.readFileSync(process.argv[2], "utf8"), byId = {};
class Node {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, style: {}, text: "" }); }
  set textContent(text) { this.text = text; this.children = []; }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join("|"); }
  get value() { return this.chosen ?? this.children[0].textContent; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren() { this.children = []; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
}
for (const [, tag, id] of page.matchAll(/<(\\w+)[^>]* id="(\\w+)"/g)) byId[id] = new Node(tag);
byId.data.textContent = page.match(/id="data">([^]*?)<\\/script>/)[1];
const document = new Node("html");
document.getElementById = (id) => byId[id];
document.createElement = document.createElementNS = (...names) => new Node(names.at(-1));
new Function("document", page.match(/<script>([^]*?)<\\/script>/)[1])(document);
const isCurve = (node) => node.attributes.class === "curve";
const told = () => ({
  place: byId.place.textContent,
  numbers: byId.numbers.children.map((row) => row.children.map((cell) => cell.textContent)),
  curves: byId.curves.children.map((figure) => figure.children[0].children.filter(isCurve).length),
});
const cells = byId.cells.children.filter((cell) => cell.attributes.tabindex), all = { first: told() };
all.cells = cells.map((cell) => [cell.listeners.mouseenter(), told()][1]);
cells[4].listeners.click();
all.clicked = told();
document.listeners.keydown({ key: "ArrowLeft", preventDefault() {} });
all.moved = told();
byId.along.chosen = "omega";
byId.along.listeners.change();
all.along = told();
console.log(JSON.stringify(all));
"""


def known_diagram():
    """Two omegas and three alphas: both branches everywhere, but for the semantic one in the first cell."""
    alphas, omegas = np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.3])
    numbers = {"positional": [], "semantic": []}
    for branch, cells in numbers.items():
        for k in range(6):
            cells.append(point(1.0 + k + 0.5 * (branch == "semantic"), 0.5, branch).replicates)
    stacked = {b: jax.tree.map(lambda *a: np.stack(a).reshape(2, 3, *a[0].shape), *c) for b, c in numbers.items()}
    cells = {
        name: np.stack([np.asarray(stacked[b].numbers()[name]) for b in stacked])
        for name in stacked["semantic"].numbers()
    }
    cells["status"][1, 0, 0] = int(ta.Status.absent)
    return made.diagram(("alpha", alphas), ("omega", omegas), cells, {"model": "DotProduct</script>"})


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_data_of_the_page_are_those_of_the_table():
    diagram = known_diagram()
    data, rows = data_of(diagram_page(diagram)), diagram.table()
    assert data["axes"][0]["values"] == ["1", "2", "3"] and data["axes"][1]["label"].endswith("ω")
    np.testing.assert_allclose(data["axes"][0]["edges"], [0, 1 / 3, 2 / 3, 1])
    regions = [data["regions"][code]["name"].split(",")[0] for code in np.ravel(data["region"])]
    for row, region in zip(rows, regions, strict=True):
        assert region in row["region"]
    orders, losses, errors = data["panels"]
    for lines, columns in (
        (orders, ("positional_m_0", "semantic_theta_0")),
        (losses, ("positional_train_loss", "semantic_train_loss")),
        (errors, ("positional_gen_error", "semantic_gen_error", "positional_gen_error_linear")),
    ):
        for line, column in zip(lines["lines"], columns, strict=True):
            np.testing.assert_array_equal(np.ravel(np.array(line["value"], float)), [row[column] for row in rows])
    bars = np.array(losses["lines"][1]["bar"], float)
    np.testing.assert_array_equal(bars.ravel(), [row["semantic_train_loss_stderr"] for row in rows])
    for line, boundary in zip(data["boundaries"], (diagram.alpha_c(), diagram.alpha_l()), strict=True):
        assert sum(map(len, line["runs"])) == len(line["bars"]) == boundary.found.sum()
    state = diagram.semantic
    mean, bar = state.mean.train_loss[1, 2], state.stderr.train_loss[1, 2]
    assert data["columns"]["semantic"]["train_loss"][1][2] == str(ta.results.Average(mean, bar))
    assert data["columns"]["semantic"]["status"][0][0] == "absent"


def test_lines_of_the_page_pass_no_row_without_a_value():
    """alpha_c is 1.5, 2 and 2.5 in three of four rows; in the second one no branch is lower than the other."""
    diagram = known_diagram()
    cells = {k: np.concatenate([a, a], 1) for k, a in made.cells_of(diagram).items()}
    a, crossing = np.array([1.0, 2.0, 3.0])[None, :, None], np.array([1.5, 9.0, 2.0, 2.5])[:, None, None]
    cells["status"] = 0 * cells["status"]
    cells["train_loss"] = np.stack([a - crossing + np.zeros((4, 3, 2)), np.zeros((4, 3, 2))])
    cells["train_loss_by_alpha"] = np.stack([np.ones((4, 3, 2)), np.zeros((4, 3, 2))])
    diagram = made.diagram(diagram.x, ("omega", np.array([0.1, 0.2, 0.3, 0.4])), cells)
    line, _ = data_of(diagram_page(diagram))["boundaries"]
    assert [len(run) for run in line["runs"]] == [1, 2] and len(line["bars"]) == 3
    np.testing.assert_allclose(np.concatenate(line["runs"]), [[1 / 3, 1 / 8], [0.5, 5 / 8], [2 / 3, 7 / 8]])
    lone = [artist for artist in diagram.plot().axes[0].lines if artist.get_gid() == "alpha_c, points"]
    np.testing.assert_allclose(lone[0].get_xydata(), [[1.5, 0.1]])


def test_page_needs_no_network_and_no_names_that_are_not_there():
    page = diagram_page(known_diagram())
    assert not re.search(r"""(?:src|href)=|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)""", page)
    ids = set(re.findall(r' id="(\w+)"', page))
    used = set(re.findall(r'\$\("(\w+)"\)', page)) | set(re.findall(r"#(\w+)[ :{]", page.split("</style>")[0]))
    assert used <= ids | {"eee", "fff", "111", "8884", "181818", "555", "000"}
    assert page.count("<script") == 2 == page.count("</script>")  # text of a user ends no element


@pytest.mark.skipif(shutil.which("node") is None, reason="needs a JavaScript engine")
def test_script_tells_the_numbers_of_a_cell(tmp_path):
    diagram = known_diagram()
    diagram.to_html(tmp_path / "diagram.html")
    (tmp_path / "browser.js").write_text(BROWSER)
    command = ["node", str(tmp_path / "browser.js"), str(tmp_path / "diagram.html")]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    data, names = data_of((tmp_path / "diagram.html").read_text()), diagram.region_names
    for k, cell in enumerate(told["cells"]):
        j, i = divmod(k, 3)
        assert cell["place"].startswith(f"alpha = {i + 1}, omega = {(0.1, 0.3)[j]}: ")
        assert cell["place"].split(": ")[1].split(",")[0] in names[j, i]
        head, *rows = cell["numbers"]
        assert head == ["", "positional", "semantic", "global minimum"]
        for name, *texts in rows:
            assert texts == [data["columns"][column][name][j][i] for column in head[1:]]
    assert told["first"]["place"].startswith("alpha = 1, omega = 0.1")
    assert told["clicked"]["place"].startswith("alpha = 2, omega = 0.3")
    assert told["moved"]["place"].startswith("alpha = 1, omega = 0.3")
    assert told["clicked"]["curves"] == [4, 4, 6]  # steps of two curves of three points, and of the baseline
    assert told["along"]["curves"] == [1, 1, 2]  # the first cell has no semantic state


def test_bad_paths_and_batches_are_refused(tmp_path):
    diagram = known_diagram()
    for path, words in (
        (tmp_path / "diagram.txt", "path must be that of an .html file"),
        (tmp_path / "file" / "diagram.html", "path must be a file that can be written"),
    ):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(ta.InputError, match=words):
            diagram.to_html(path)
    batch = jax.tree.map(lambda a: np.stack([a, a]), diagram)
    with pytest.raises(ta.InputError, match="diagram must be one diagram, got a batch"):
        batch.to_html(tmp_path / "diagram.html")
    assert not (tmp_path / "diagram.html").exists()
