"""The file of settings: which one holds, the line of each key, and what is said of a broken one."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.errors import ConfigError
from ckptmirror.local import settings_file
from ckptmirror.local.settings_file import find_file, named_file

OWN = 'root = "x"\n'
SECTION = '[project]\nname = "p"\n\n[tool.ckptmirror]\nroot = "y"\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, at which every search ends."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def made(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found_from(directory: Path) -> Path | None:
    directory.mkdir(parents=True, exist_ok=True)
    found = find_file(directory)
    return None if found is None else found.path


# -- which file ---------------------------------------------------------------------------------------------


def test_the_nearest_file_holds_and_no_other(home: Path):
    far, near = made(home / "ckptmirror.toml", OWN), made(home / "a" / "b" / "pyproject.toml", SECTION)
    assert found_from(home / "a" / "b" / "c") == near
    assert found_from(home / "a") == far


def test_of_two_in_one_directory_the_file_of_our_own_holds(home: Path):
    made(home / "pyproject.toml", SECTION)
    own = made(home / "ckptmirror.toml", OWN)
    assert found_from(home) == own


@pytest.mark.parametrize("text", ["", '[project]\nname = "p"\n', '[project]\ndependencies = ["ckptmirror"]\n'])
def test_a_project_without_our_table_is_passed_by(home: Path, text: str):
    far = made(home / "ckptmirror.toml", OWN)
    made(home / "a" / "pyproject.toml", text)
    assert found_from(home / "a") == far


def test_a_broken_project_that_does_not_name_us_is_not_ours_to_judge(home: Path):
    made(home / "a" / "pyproject.toml", "[project\n")
    assert found_from(home / "a") is None


@pytest.mark.parametrize("mark", [".git", ".hg"])
def test_the_search_ends_at_the_root_of_a_repository(home: Path, mark: str):
    made(home / "ckptmirror.toml", OWN)
    (home / "repository" / mark).mkdir(parents=True)
    assert found_from(home / "repository" / "inside") is None
    there = made(home / "repository" / "ckptmirror.toml", OWN)
    assert found_from(home / "repository" / "inside") == there


def test_the_search_ends_at_the_home_directory(home: Path, monkeypatch: pytest.MonkeyPatch):
    made(home / "ckptmirror.toml", OWN)
    (home / "person" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home / "person"))
    assert found_from(home / "person" / "work") is None
    assert found_from(home / "person") is None


def test_a_directory_above_into_which_anybody_may_put_files_is_not_looked_at(home: Path):
    shared = made(home / "shared" / "ckptmirror.toml", OWN).parent
    made(home / "ckptmirror.toml", OWN)
    shared.chmod(0o1777)
    assert found_from(shared / "job") is None
    assert found_from(shared) == shared / "ckptmirror.toml"  # who works there means it
    shared.chmod(0o777)  # a volume of a container, not a directory for everyone's temporary files
    assert found_from(shared / "job") == shared / "ckptmirror.toml"


def test_without_a_file_there_is_none(home: Path):
    assert found_from(home / "a") is None


def test_a_working_directory_that_is_gone_has_no_file(home: Path, monkeypatch: pytest.MonkeyPatch):
    before = Path.cwd()
    gone = home / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert find_file() is None
        named = named_file(made(home / "x.toml", OWN), "V")
        assert named is not None
        assert named.where("root") == f"{home}/x.toml:1"
    finally:
        os.chdir(before)


def test_a_named_file_is_read_wherever_it_is_and_a_project_by_its_table(home: Path):
    own, project = made(home / "x.conf", OWN), made(home / "p" / "pyproject.toml", SECTION)
    for path, root in ((own, "x"), (project, "y")):
        named = named_file(path, "V")
        assert named is not None
        assert named.values == {"root": root}
    with pytest.raises(ConfigError, match=r"^V: there is no .*/nowhere\.toml\.\n"):
        named_file(home / "nowhere.toml", "V")


# -- the line of a key --------------------------------------------------------------------------------------


WHOLE = '''# a comment, root = "no"

root = "/x"
kinds = [
    "dcp",  # timeout_s = 3
    "model",
]
state_dir = """
timeout_s = 9
"""
retention.keep_last = 2

[[mirrors]]
url = "a"

[[mirrors]]
required = false
url = "b"
'''
LINES = {
    "root": 3,
    "kinds": 4,
    "kinds[0]": 4,
    "kinds[1]": 4,
    "state_dir": 8,
    "retention": 11,
    "retention.keep_last": 11,
    "mirrors": 13,
    "mirrors[0]": 13,
    "mirrors[0].url": 14,
    "mirrors[1]": 16,
    "mirrors[1].required": 17,
    "mirrors[1].url": 18,
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_key_has_the_line_on_which_it_is_set(home: Path, newline: str):
    (home / "ckptmirror.toml").write_text(WHOLE, newline=newline)
    found = find_file(home)
    assert found is not None
    assert found.lines == LINES


def test_the_lines_in_a_project_are_those_of_the_whole_file(home: Path):
    text = '[project]\ndependencies = ["ckptmirror"]\n\n[tool.ruff]\nroot = 1\n\n[ tool . ckptmirror ]\nroot = "x"\n\n'
    made(home / "pyproject.toml", text + "[tool.ckptmirror.retention]\nkeep_last = 1\n[tool.other]\nroot = 3\n")
    found = find_file(home)
    assert found is not None
    assert found.lines == {"root": 8, "retention": 10, "retention.keep_last": 11}


def test_a_table_that_is_written_otherwise_has_its_lines_too(home: Path):
    made(home / "pyproject.toml", '[project]\nname = "x"\n[tool]\n\nckptmirror.root = "x"\n')
    found = find_file(home)
    assert found is not None
    assert found.where("root").endswith("pyproject.toml:5")


@given(
    st.lists(
        st.sampled_from(["", "# x = 1", 'a{} = """\nb = 1\n"""', "a{} = [\n1,\n\n2]", "a{} = {{b = 1}}", "a{} = '#['"]),
        max_size=12,
    )
)
def test_a_key_stands_on_its_line_whatever_stands_before_it(
    tmp_path_factory: pytest.TempPathFactory, before: list[str]
):
    text = "\n".join(piece.format(number) for number, piece in enumerate(before))
    folder = tmp_path_factory.mktemp("lines")
    made(folder / "ckptmirror.toml", f"{text}\nroot = 1\n")
    found = find_file(folder)
    assert found is not None
    assert found.lines["root"] == text.count("\n") + 2


def test_a_file_below_the_working_directory_goes_by_its_relative_path(home: Path, monkeypatch: pytest.MonkeyPatch):
    path = made(home / "a" / "ckptmirror.toml", OWN)
    found = find_file(path.parent)
    assert found is not None
    for working, shown in ((home, "a/ckptmirror.toml:1"), (home / "a", "ckptmirror.toml:1")):
        monkeypatch.chdir(working)
        assert found.where("root") == shown
    (home / "b").mkdir()
    monkeypatch.chdir(home / "b")
    assert found.where("root") == f"{path}:1"
    assert found.where("nothing") == str(path)


# -- what is wrong with a file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'root = "a"\nkinds = = 3\n', 2),
        (b'root = "a"\n\nroot = "b"\n', 3),
        (b'root = "a"\nkinds = ["dcp",\n', 2),
        (b'root = "a\n', 1),
        (b"\n[retention\n", 2),
        (b"root\n", 1),
        (b'\nroot = "\xff"\n', 2),
    ],
)
def test_a_file_that_is_no_toml_is_told_of_with_the_line(home: Path, text: bytes, line: int):
    (home / "ckptmirror.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"ckptmirror\.toml:{line}: this is not (TOML|UTF-8)") as told:
        find_file(home)
    assert "\n" not in str(told.value)
    assert "ckptmirror config" in told.value.hint


def test_a_file_that_is_nested_too_deeply_is_told_of(home: Path):
    made(home / "ckptmirror.toml", f"root = {'[' * 5000}{']' * 5000}\n")
    with pytest.raises(ConfigError, match="nested too deeply"):
        find_file(home)


def test_a_file_that_cannot_be_read_is_not_taken_for_none(home: Path):
    (home / "ckptmirror.toml").mkdir()
    with pytest.raises(ConfigError, match=r"ckptmirror\.toml cannot be read: Is a directory"):
        find_file(home)


def test_a_section_that_is_no_table_is_told_of(home: Path):
    made(home / "pyproject.toml", "[tool]\nckptmirror = 3\n")
    with pytest.raises(ConfigError, match=r"pyproject\.toml: tool\.ckptmirror is not a table"):
        find_file(home)


# -- a file that somebody else put there ---------------------------------------------------------------------


def test_a_settings_file_is_a_regular_file_of_limited_size(home: Path):
    path = home / "ckptmirror.toml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        find_file(home)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        find_file(home)
    path.unlink()
    made(home / "target.toml", OWN)
    path.symlink_to("target.toml")
    assert found_from(home) == path
    made(home / "target.toml", "#" * 1024 * 1024 + "\n")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        find_file(home)
    named = named_file(Path(os.devnull), "V")
    assert named is not None
    assert named.values == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
@pytest.mark.parametrize("name", ["ckptmirror.toml", "pyproject.toml"])
@pytest.mark.parametrize("is_link", [False, True])
def test_another_users_file_is_not_taken_from_a_directory_that_everyone_may_write_to(
    home: Path, name: str, is_link: bool
):
    place = home / "place"
    path = made(place / name, SECTION if name == "pyproject.toml" else OWN)
    if is_link:
        path.rename(home / name)
        path.symlink_to(home / name)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    assert found_from(place / "job") == path  # only its owner may write there, and chose who does
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=r"is not read: it belongs to user id 65534.*everyone") as told:
        find_file(place / "job")
    assert f"CKPTMIRROR_CONFIG={path}" in told.value.hint
    assert named_file(path, "CKPTMIRROR_CONFIG") is not None
    os.chown(place, 65534, 65534)
    assert found_from(place / "job") == path


def test_a_file_that_every_user_may_write_to_is_not_read(home: Path):
    path = made(home / "ckptmirror.toml", OWN)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="every user may write to it") as told:
        find_file(home)
    assert f"chmod o-w {path}" in told.value.hint
    assert named_file(path, "CKPTMIRROR_CONFIG") is not None


@pytest.mark.parametrize(
    "line", ["# {}\n", "a{} = 1\n", "\n", "[t{}]\na = 1\n", 'b{} = """\n\n\n"""\n', "c{} = [\n1,\n\n2]\n"]
)
def test_the_lines_of_a_long_file_are_found_by_parsing_each_of_its_lines_once(
    home: Path, line: str, monkeypatch: pytest.MonkeyPatch
):
    parsed = 0

    def loads(text: str) -> dict[str, object]:
        nonlocal parsed
        parsed += len(text)
        return tomllib.loads(text)

    monkeypatch.setattr(settings_file, "tomllib", SimpleNamespace(loads=loads))
    text = "".join(line.format(number) for number in range(4000))
    path = made(home / "ckptmirror.toml", f"{text}[last]\nx = 2\n")
    found = find_file(home)
    assert found is not None
    assert found.where("last.x") == f"{path}:{text.count(chr(10)) + 2}"
    assert parsed <= 2 * len(path.read_text())


@pytest.mark.parametrize("key", ["a{} = 1", "[a{}]", 'x = [1.5, {{ b = {{"a"{} = 1}} }}]'])
def test_a_key_has_a_limit_of_parts(home: Path, key: str):
    made(home / "ckptmirror.toml", key.format(" . a" * 63))
    assert found_from(home)
    made(home / "ckptmirror.toml", key.format(" . a" * 400_000)[: 2**20])  # its parser would not end today
    with pytest.raises(ConfigError, match="nested too deeply"):
        find_file(home)
    made(home / "ckptmirror.toml", f"a = [{'1.5, ' * 1000}]\nb = '{'.' * 1000}' # {'.' * 1000}")
    assert found_from(home)


def test_a_number_of_too_many_digits_is_told_of(home: Path):
    made(home / "ckptmirror.toml", f"a = {'1' * 5000}\n")
    with pytest.raises(ConfigError, match="this is not TOML: Exceeds the limit"):
        find_file(home)
