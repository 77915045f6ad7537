"""``--help``: what a person reads at 80 columns, verb by verb."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from ckptmirror.cli._exit_codes import MEANINGS
from ckptmirror.cli._program import program
from ckptmirror.core import errors
from tests.integration.test_docs import REFERENCE, rows, sections, verbs

HOME = Path(__file__).resolve().parents[2]
COLUMNS = 80


def command_of(verb: str) -> click.Command:
    command = program.get_command(click.Context(program), verb)
    assert command is not None
    return command


def help_of(verb: str) -> str:
    command = command_of(verb)
    context = click.Context(command, info_name=f"ckptmirror {verb}", terminal_width=COLUMNS, max_content_width=COLUMNS)
    return command.get_help(context)


def options_of(verb: str) -> list[click.Option]:
    return [parameter for parameter in command_of(verb).params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("verb", verbs())
def test_a_help_text_has_a_description_examples_and_exit_codes_and_fits_80_columns(verb: str):
    text = help_of(verb)
    too_long = [line for line in text.splitlines() if len(line) > COLUMNS and not line.startswith("    ckptmirror ")]
    assert not too_long
    body, _, after = text.partition("Options:")
    assert re.search(r"^  [A-Z].{30,}", body, re.MULTILINE)
    assert len(re.findall(rf"^    ckptmirror {verb}\b", body, re.MULTILINE)) >= 2, "two examples"
    assert re.search(r"^  Exit codes:\n    0 +done$", after, re.MULTILINE)


@pytest.mark.parametrize("verb", verbs())
def test_every_option_says_what_it_means_and_what_holds_without_it(verb: str):
    for option in options_of(verb):
        assert option.help, option.opts
        assert option.help.rstrip()[-1] in ".]", f"{verb} {option.opts}: a sentence"
        if not option.is_flag and not option.required and "required" not in option.help:
            assert "[default: " in option.help, f"{verb} {option.opts}"


@pytest.mark.parametrize("verb", verbs())
def test_the_page_of_the_command_line_says_a_default_where_the_help_does_and_the_same_number(verb: str):
    said = {row[0].split("`")[1]: row[1] for row in rows(sections("cli.md")[verb])}
    for option in options_of(verb):
        if option.name in ("verbose", "as_json"):
            continue
        number = re.search(r"\[default: ([0-9.]+)\]", option.help or "")
        if number is not None:
            assert f"default {number[1]}" in said[option.opts[-1]], f"{verb} {option.opts}"
        if "[default: never]" in (option.help or ""):
            assert "default: never" in said[option.opts[-1]], f"{verb} {option.opts}"


def test_the_exit_codes_of_a_help_text_are_those_of_the_page_and_of_the_errors():
    page = {int(code): meaning for code, meaning, _ in rows((REFERENCE / "exit-codes.md").read_text())}
    assert page == MEANINGS
    of_errors = {getattr(errors, name).exit_code for name in errors.__all__}
    assert of_errors | {0, 130, 143} == set(MEANINGS)
    for verb in verbs():
        named = dict(re.findall(r"^    ([0-9]+) +(.*)$", help_of(verb).partition("Exit codes:")[2], re.MULTILINE))
        assert {0, 1, 2, 130, 143} <= set(map(int, named))
        assert all(MEANINGS[int(code)] == meaning for code, meaning in named.items())


def test_the_list_of_verbs_cuts_no_sentence_off():
    context = click.Context(program, info_name="ckptmirror", terminal_width=COLUMNS, max_content_width=COLUMNS)
    listed = program.get_help(context).partition("Commands:")[2].strip().splitlines()
    assert [line.split()[0] for line in listed] == verbs()
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)
