"""What `--help` says: each option has at most one default."""

import re
import sys

import pytest

from text_generation_inference import cli
from text_generation_inference.bench.static import command as static_command
from text_generation_inference.launch import command, server_command

COMMANDS = {
    "tgi": (cli.main, []),
    "tgi generate": (cli.main, ["generate"]),
    "tgi serve": (cli.main, ["serve"]),
    "tgi check": (cli.main, ["check"]),
    "tgi download": (cli.main, ["download"]),
    "tgi bench": (cli.main, ["bench"]),
    "tgi bench offline": (cli.main, ["bench", "offline"]),
    "tgi bench serve": (cli.main, ["bench", "serve"]),
    "tgi bench report": (cli.main, ["bench", "report"]),
    "text-generation-launcher": (command.main, []),
    "text-generation-server": (server_command.main, []),
    "text-generation-server download-weights": (server_command.main, ["download-weights"]),
    "text-generation-server measure": (server_command.main, ["measure"]),
    "text-generation-benchmark": (static_command.main, []),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_one_default_each(name, monkeypatch, capsys):
    main, arguments = COMMANDS[name]
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", [name])
    try:
        assert main([*arguments, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code in (0, None)
    shown = capsys.readouterr().out
    options = re.split(r"\n  (?=-)", shown)  # each begins a line of its own
    told = {
        text.split()[0]: len(re.findall(r"[(\[;, ]default:? ", " ".join(text.split("\n\n")[0].split())))
        for text in options[1:]
    }
    assert [option for option, count in told.items() if count > 1] == []
    assert "default: None" not in shown and "default: False" not in shown and "default: []" not in shown


def test_defaults_of_generate(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "longest answer (default: 256)" in shown and "(default: embedded)" in shown and "(default: 1.0)" in shown
