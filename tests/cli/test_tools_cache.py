"""The command `tools cache`."""

import json

from anechoic.cli.main import main
from anechoic.storage.cache import open_entry


def test_cache_lists_and_clears_entries(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path))
    for kind, size in (("pixels", 3000), ("features", 500)):
        with open_entry(kind, "0" * 32, about=f"{kind} of photos") as entry:
            (entry.path / "data.bin").write_bytes(b"x" * size)
            entry.commit(entry.hashes(["data.bin"]))
    assert main(["tools", "cache"]) == 0
    text = capsys.readouterr().out
    assert "pixels of photos" in text
    assert "features of photos" in text
    assert main(["tools", "cache", "pixels", "--clear", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["freed"] >= 3000
    assert main(["tools", "cache", "--json"]) == 0
    assert [row["kind"] for row in json.loads(capsys.readouterr().out)["metrics"]["rows"]] == ["features"]
