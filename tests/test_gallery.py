"""docs/your-model.md: every example runs, in order, one namespace per section."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"
LIBRARIES = ("timm", "transformers", "torchvision", "diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def sections():
    """Heading -> its runnable code, without the opening lines, which speak of a model in general."""
    found = {}
    for part in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        code = re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
        if code:
            found[part.splitlines()[0]] = "\n".join(code)
    return found


@pytest.mark.parametrize("heading", sections())
def test_the_example_runs(heading):
    code = sections()[heading]
    for library in LIBRARIES:
        if re.search(rf"^(?:import|from) .*\b{library}\b", code, flags=re.MULTILINE):
            pytest.importorskip(library, reason=f"{library} is what this example is about")
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), {"__name__": "gallery"})


def test_every_library_has_an_example():
    assert len(sections()) >= 9
    for library in (*LIBRARIES, "torch"):
        assert any(library in heading for heading in sections())
