"""What all commands share: how they print what a model wrote."""

import sys

from mmrl.cli import main
from mmrl.cli.command import for_terminal


def test_a_terminal_gets_no_control_characters_of_a_model_and_a_pipe_gets_all(monkeypatch):
    text = "red\x1b[2J\n\tgr\u00fcn\x07"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert for_terminal(text) == "red\N{REPLACEMENT CHARACTER}[2J\n\tgr\u00fcn\N{REPLACEMENT CHARACTER}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert for_terminal(text) == text


def test_errors_and_findings_carry_no_control_characters_of_data(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "image": "\\u001b[2Ja.png"}\n')
    assert main(["data", "check", str(rows)]) == 1
    assert "\x1b" not in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "\x1b[2Jb.jsonl")]) == 2
    assert "\x1b" not in capsys.readouterr().err
