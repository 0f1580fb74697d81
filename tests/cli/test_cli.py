"""The command line as a whole: light to import, readable, and refusing in one line."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "transformers")


def test_version(run):
    from kvstore import __version__

    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"kvstore {__version__}\n"


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_help_has_examples(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"kvstore {command} " in result.stdout.split("Examples:")[1]


def test_help_lists_the_commands(run):
    text = run("--help").stdout
    assert "demo" in text
    assert "generate" in text


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_nothing_heavy_is_imported_for_help(arguments):
    script = (
        "import sys\nfrom kvstore.cli import main\n"
        f"sys.argv = ['kvstore', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_cli_extra(monkeypatch, capsys, missing):
    import kvstore.cli

    for name in [n for n in sys.modules if n.startswith(("kvstore.cli.", missing + "."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "rich":
        monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as stopped:
        kvstore.cli.main()
    assert stopped.value.code == 2
    assert 'pip install "kvstore-engine[demo]"' in capsys.readouterr().err


def test_missing_transformers(monkeypatch, refused, model_dir, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the text")
    for name in [n for n in sys.modules if n.startswith("kvstore.adapters.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvstore.cli.generation", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refused("generate", "--model", model_dir, "--prompt-file", prompt)
    assert line == 'kvstore: transformers is not installed; run: pip install "kvstore-engine[demo]"'


def test_a_bug_keeps_its_traceback():
    from kvstore.cli.errors import one_line_errors

    with pytest.raises(ModuleNotFoundError), one_line_errors():
        raise ModuleNotFoundError(name="no_such_module")
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError
