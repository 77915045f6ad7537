"""Settings: which place wins, where each value comes from, and what is said of everything that cannot be."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager, MirrorSpec, Retention
from ckptmirror.config import FILE_VARIABLE, SETTINGS, Settings, load_settings
from ckptmirror.core.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2] / "ckptmirror"
NAMES = [setting.name for setting in SETTINGS]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is the home directory too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(file: str = "", flags: dict[str, Any] | None = None, **variables: str) -> Settings:
    if file:
        Path("ckptmirror.toml").write_text(file)
    return load_settings(flags, environ=variables)


def refused(*words: str, file: str = "", flags: dict[str, Any] | None = None, **variables: str) -> ConfigError:
    """What is raised: one sentence with these words, and a hint."""
    with pytest.raises(ConfigError) as told:
        load(file, flags, **variables)
    assert "\n" not in str(told.value)
    assert str(told.value).endswith(".")
    assert told.value.hint
    assert told.value.exit_code == 10
    for word in words:
        assert word in str(told.value)
    return told.value


# -- the table ----------------------------------------------------------------------------------------------


def test_the_settings_are_the_arguments_of_a_manager_with_their_defaults():
    def arguments(cls: type) -> dict[str, Any]:
        return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}

    manager = arguments(CheckpointManager)
    said = {setting.name: setting.default for setting in SETTINGS}
    assert said.pop("root") is None
    assert {name for name in said if "." not in name} == set(manager) - {
        "root",
        "process_group",
        "pp_rank",
        "retention",
    }
    assert {name: manager[name] for name in said if "." not in name} == {n: said[n] for n in said if "." not in n}
    assert {name.partition(".")[2]: said[name] for name in said if "." in name} == arguments(Retention)


def test_every_variable_that_the_package_reads_is_known():
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"\bCKPTMIRROR_[A-Z_]+\b", text)) - {FILE_VARIABLE, "CKPTMIRROR_"}
    for variable in named:
        load(**{variable: ""})


def test_defaults_pass_their_own_checks():
    for setting in SETTINGS:
        if setting.default is not None:
            assert setting.check(setting.default) == setting.default


# -- which place wins ---------------------------------------------------------------------------------------

PLACES = {
    "root": ('root = "/file"', "/variable", "/flag", Path("/file"), Path("/variable"), Path("/flag")),
    "mirrors": (
        'mirrors = ["/file"]',
        "/variable, gs://bucket/x",
        ["/flag"],
        (MirrorSpec("file:///file"),),
        (MirrorSpec("file:///variable"), MirrorSpec("gs://bucket/x")),
        (MirrorSpec("file:///flag"),),
    ),
    "kinds": ('kinds = ["dcp"]', "model", ["model", "dcp"], ("dcp",), ("model",), ("model", "dcp")),
    "mode": ('mode = "blocking"', "async", "blocking", "blocking", "async", "blocking"),
    "state_dir": ('state_dir = "/file"', "/variable", "/flag", Path("/file"), Path("/variable"), Path("/flag")),
    "persistent_dir": ('persistent_dir = "/a"', "/b", "/c", Path("/a"), Path("/b"), Path("/c")),
    "signing_key": ('signing_key = "/a"', "/b", "/c", Path("/a"), Path("/b"), Path("/c")),
    "verify_keys": ('verify_keys = ["/a"]', "/b, /c", ["/d"], (Path("/a"),), (Path("/b"), Path("/c")), (Path("/d"),)),
    "workers_per_mirror": ("workers_per_mirror = 3", "4", 5, 3, 4, 5),
    "share_downloads": ("share_downloads = true", "false", True, True, False, True),
    "timeout_s": ("timeout_s = 30", "1.5", 2, 30.0, 1.5, 2.0),
    "retention.keep_last": ("retention.keep_last = 3", "none", 5, 3, None, 5),
    "retention.keep_every": ('retention.keep_every = "none"', "4", 5, None, 4, 5),
    "retention.keep_best": ("[retention]\nkeep_best = 3\nmetric = 'm'", "4", 5, 3, 4, 5),
    "retention.metric": ("[retention]\nmetric = 'm'\nkeep_best = 3", "m2", "m3", "m", "m2", "m3"),
    "retention.mode": ("[retention]\nmode = 'max'", "min", "max", "max", "min", "max"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(name: str):
    file, text, flag, of_file, of_variable, of_flag = PLACES[name]
    setting = next(setting for setting in SETTINGS if setting.name == name)
    line = next(n for n, row in enumerate(file.splitlines(), 1) if name.rpartition(".")[2] in row)

    def shown(settings: Settings) -> tuple[Any, str]:
        return settings[name], settings.values[name].source

    assert shown(load()) == (setting.default, "default")
    assert shown(load(file)) == (of_file, f"ckptmirror.toml:{line}")
    assert shown(load(file, **{setting.variable: text})) == (of_variable, setting.variable)
    assert shown(load(file, {name: flag}, **{setting.variable: text})) == (of_flag, setting.flag or name)
    assert shown(load(file, {name: None}, **{setting.variable: ""})) == (of_file, f"ckptmirror.toml:{line}")


def test_a_value_is_taken_whole_and_its_neighbours_stay():
    found = load(
        'mirrors = ["/a", "/b"]\n[retention]\nkeep_last = 2\nkeep_every = 10\n',
        CKPTMIRROR_MIRRORS="/c",
        CKPTMIRROR_RETENTION_KEEP_LAST="7",
    )
    assert [spec.url for spec in found["mirrors"]] == ["file:///c"]
    assert found.retention == Retention(keep_last=7, keep_every=10)


def test_mirrors_have_their_options_in_tables():
    found = load(
        '[[mirrors]]\nurl = "gs://bucket/x"\nbytes_per_s = 200e6\n\n'
        '[[mirrors]]\nurl = "s3://b/x"\nrequired = false\nrequests_per_s = 20\n'
    )
    assert found["mirrors"] == (
        MirrorSpec("gs://bucket/x", bytes_per_s=200e6),
        MirrorSpec("s3://b/x", required=False, requests_per_s=20),
    )


def test_urls_and_tables_may_stand_in_one_list():
    found = load('mirrors = ["/a", { url = "/b", required = false }]')
    assert found["mirrors"] == (MirrorSpec("file:///a"), MirrorSpec("file:///b", required=False))


def test_the_variable_may_be_called_as_the_flag_is_but_not_both():
    found = load(CKPTMIRROR_MIRROR="/a")
    assert ([spec.url for spec in found["mirrors"]], found.values["mirrors"].source) == (
        ["file:///a"],
        "CKPTMIRROR_MIRROR",
    )
    refused("CKPTMIRROR_MIRROR and CKPTMIRROR_MIRRORS are both set", CKPTMIRROR_MIRROR="/a", CKPTMIRROR_MIRRORS="/b")
    assert load(CKPTMIRROR_MIRROR="/a", CKPTMIRROR_MIRRORS="")["mirrors"]


def test_a_path_is_relative_to_its_file_and_home_is_home(here: Path):
    folder = here / "project"
    (folder / "deep").mkdir(parents=True)
    (folder / "ckptmirror.toml").write_text('root = "runs/1"\nstate_dir = "~/state"\n')
    found = load_settings(directory=folder / "deep", environ={})
    assert found["root"] == folder / "runs" / "1"
    assert found["state_dir"] == here / "state"
    assert load(CKPTMIRROR_ROOT="~/runs", CKPTMIRROR_STATE_DIR="state")["root"] == here / "runs"


def test_a_named_file_is_read_in_place_of_the_one_that_would_be_found(here: Path):
    (here / "other.toml").write_text('root = "/other"')
    found = load('root = "/here"', CKPTMIRROR_CONFIG="other.toml")
    assert (found["root"], found.values["root"].source, found.file) == (
        Path("/other"),
        "other.toml:1",
        here / "other.toml",
    )
    assert load('root = "/here"', CKPTMIRROR_CONFIG="/dev/null")["root"] is None
    refused("CKPTMIRROR_CONFIG: there is no", CKPTMIRROR_CONFIG="nowhere.toml")


def test_without_a_file_the_environment_is_enough():
    found = load(CKPTMIRROR_ROOT="/r", CKPTMIRROR_MIRRORS="/m", PATH="/bin")
    assert found.file is None
    assert found.manager_arguments() == {
        "root": Path("/r"),
        "mirrors": (MirrorSpec("file:///m"),),
        "kinds": ("dcp", "model"),
        "mode": "async",
        "state_dir": None,
        "persistent_dir": None,
        "workers_per_mirror": 2,
        "share_downloads": False,
        "timeout_s": 600.0,
        "signing_key": None,
        "verify_keys": (),
        "retention": Retention(),
    }


def test_a_manager_needs_a_root():
    with pytest.raises(ConfigError, match="No root is set") as told:
        load('mirrors = ["/m"]').manager_arguments()
    assert "CKPTMIRROR_ROOT" in told.value.hint


# -- unknown names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "near"),
    [
        ('roots = "/x"', 1, "root"),
        ('\nmirror = "/x"', 2, "mirrors"),
        ("keep_last = 2", 1, "retention.keep_last"),
        ('metric = "m"', 1, "retention.metric"),
        ("[retention]\n\nkeep_lst = 2", 3, "retention.keep_last"),
        ("[retention]\nkeep-every = 2", 2, "retention.keep_every"),
        ("timeout = 4", 1, "timeout_s"),
        ('[[mirrors]]\nurl = "/a"\nrequire = true', 3, "required"),
        ('[[mirrors]]\nurl = "/a"\n[[mirrors]]\nurl = "/b"\nbytes_per_second = 3', 5, "bytes_per_s"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(text: str, line: int, near: str):
    refused(f"ckptmirror.toml:{line}: ", f"(did you mean {near}?)", file=text)


def test_a_key_that_is_like_nothing_is_refused_with_all_that_there_are():
    refused("ckptmirror.toml:1: there is no setting zzzzz (there are ", ", ".join(NAMES), file="zzzzz = 1")


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("CKPTMIRROR_ROTO", "CKPTMIRROR_ROOT"),
        ("CKPTMIRROR_KEEP_LAST", "CKPTMIRROR_RETENTION_KEEP_LAST"),
        ("CKPTMIRROR_TIMEOUT", "CKPTMIRROR_TIMEOUT_S"),
        ("CKPTMIRROR_WORKERS", "CKPTMIRROR_WORKERS_PER_MIRROR"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(variable: str, near: str):
    refused(f"{variable} is set, but there is no such setting (did you mean {near}?)", **{variable: "1"})


def test_a_variable_that_is_like_nothing_is_refused_with_all_that_there_are():
    refused("CKPTMIRROR_ZZZZZ is set", "(there are CKPTMIRROR_ROOT, ", CKPTMIRROR_ZZZZZ="1")


def test_what_is_no_variable_of_ours_is_left_alone():
    load(CKPTMIRROR_CRASH_AT="3", CKPTMIRROR_CAMPAIGN="full", _CKPTMIRROR_COMPLETE="bash_source", CKPT="x")


def test_an_unknown_flag_is_refused_too():
    refused("rot: there is no setting rot (did you mean root?)", flags={"rot": "/x"})


# -- values that cannot be ----------------------------------------------------------------------------------

WRONG_IN_FILE = [
    ("root = 5", "root is 5; it must be a path"),
    ("root = ''", "root is ''; it must be a path"),
    ('root = "a\\u0000b"', "it must be a path"),
    ("root = 2026-01-01", "root is 2026-01-01; it must be a path"),
    ("root.x = 1", "root is a table; it must be a path"),
    ('root = "~nobody-of-this-name/x"', "it must be a path; there is no user of that name"),
    ("state_dir = true", "state_dir is true; it must be a path"),
    ("mirrors = 5", "mirrors is 5; it must be a list of URLs, or of tables with a url"),
    ("mirrors.url = '/a'", "mirrors is a table; it must be a list of URLs"),
    ("mirrors = '/a'", "mirrors is a list of URLs, not one URL"),
    ("mirrors = [5]", "mirrors[0] is 5; it must be a URL, or a table with a url"),
    ("mirrors = ['/a', '/a']", "configured twice"),
    ("mirrors = ['/a', 'nowhere']", "mirrors[1] is not understood"),
    ("mirrors = ['gs://b/x']", "mirrors[0] is not understood: 'gs://b/x' does not name a valid bucket"),
    ("mirrors = [{ required = true }]", "mirrors[0] is a table; it must be a URL, or a table with a url"),
    ("mirrors = [{ url = 3 }]", "mirrors[0].url is 3; it must be text"),
    ("mirrors = [{ url = '/a', required = 1 }]", "mirrors[0].required is 1; it must be true or false"),
    ("mirrors = [{ url = '/a', required = 'no' }]", "mirrors[0].required is 'no'; it must be true or false"),
    ("mirrors = [{ url = '/a', bytes_per_s = 0 }]", "mirrors[0].bytes_per_s is 0; it must be a number above 0"),
    ("mirrors = [{ url = '/a', bytes_per_s = '9M' }]", "mirrors[0].bytes_per_s is '9M'; it must be a number above 0"),
    (
        "mirrors = [{ url = '/a', requests_per_s = inf }]",
        "mirrors[0].requests_per_s is inf; it must be a number above 0",
    ),
    ("mirrors = [{ url = '/a', requests_per_s = true }]", "requests_per_s is true; it must be a number above 0"),
    ("kinds = 'dcp'", 'kinds is \'dcp\'; it must be a list of "dcp", "model" or both'),
    ("kinds = []", "kinds is []; it must be a list"),
    ("kinds = ['dcp', 'dcp']", "kinds is ['dcp', 'dcp']; it must be a list"),
    ("kinds = ['zip']", "kinds is ['zip']; it must be a list"),
    ("kinds = ['emergency']", "kinds is ['emergency']; it must be a list"),
    ("mode = 'fast'", 'mode is \'fast\'; it must be "async" or "blocking"'),
    ("mode = ['async']", 'it must be "async" or "blocking"'),
    ("workers_per_mirror = 0", "workers_per_mirror is 0; it must be a whole number from 1 up"),
    ("workers_per_mirror = 1.5", "workers_per_mirror is 1.5; it must be a whole number from 1 up"),
    ("workers_per_mirror = true", "workers_per_mirror is true; it must be a whole number from 1 up"),
    ("workers_per_mirror = 'none'", "workers_per_mirror is 'none'; it must be a whole number from 1 up"),
    ("share_downloads = 1", "share_downloads is 1; it must be true or false"),
    ("timeout_s = -1", "timeout_s is -1; it must be a number above 0"),
    ("timeout_s = nan", "timeout_s is nan; it must be a number above 0"),
    ("timeout_s = '60'", "timeout_s is '60'; it must be a number above 0"),
    ("retention = 3", "retention is 3; it must be a table, [retention]"),
    ("retention.keep_last = 0", 'retention.keep_last is 0; it must be a whole number from 1 up, or "none"'),
    ("retention.keep_last = 'all'", "retention.keep_last is 'all'; it must be a whole number from 1 up, or \"none\""),
    ("retention.keep_every = -5", "retention.keep_every is -5; it must be a whole number"),
    ("retention.keep_best = -1", "retention.keep_best is -1; it must be a whole number from 0 up"),
    ("retention.metric = ''", "retention.metric is ''; it must be text"),
    ("retention.mode = 'least'", 'retention.mode is \'least\'; it must be "min" or "max"'),
    ("retention.keep_best = 1", "retention: keep_best needs a metric"),
    ("retention.metric = 'm'", "retention: metric is set, but keep_best is 0"),
]


@pytest.mark.parametrize(("text", "words"), [case for case in WRONG_IN_FILE if case[1]])
def test_a_value_that_cannot_be_is_refused_with_its_line_and_what_it_must_be(text: str, words: str):
    refused("ckptmirror.toml:2: ", words, file=f"\n{text}\n")


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("CKPTMIRROR_ROOT", "~nobody-of-this-name/x", "must be a path"),
        ("CKPTMIRROR_MIRRORS", "nowhere", "mirrors[0] is not understood"),
        ("CKPTMIRROR_MIRRORS", "/a,/a", "configured twice"),
        ("CKPTMIRROR_KINDS", "dcp,zip", "kinds is ['dcp', 'zip']"),
        ("CKPTMIRROR_MODE", "fast", "mode is 'fast'"),
        ("CKPTMIRROR_WORKERS_PER_MIRROR", "two", "workers_per_mirror is 'two'; it must be a whole number from 1 up"),
        ("CKPTMIRROR_WORKERS_PER_MIRROR", "2.0", "workers_per_mirror is 2.0; it must be a whole number from 1 up"),
        ("CKPTMIRROR_SHARE_DOWNLOADS", "maybe", "share_downloads is 'maybe'; it must be true or false"),
        ("CKPTMIRROR_TIMEOUT_S", "5m", "timeout_s is '5m'; it must be a number above 0"),
        ("CKPTMIRROR_TIMEOUT_S", "nan", "timeout_s is nan"),
        ("CKPTMIRROR_RETENTION_KEEP_LAST", "0", "retention.keep_last is 0"),
        ("CKPTMIRROR_RETENTION_KEEP_BEST", "1", "retention: keep_best needs a metric"),
        ("CKPTMIRROR_RETENTION_MODE", "MAX", "retention.mode is 'MAX'"),
    ],
)
def test_a_variable_that_cannot_be_is_refused_by_its_name(variable: str, text: str, words: str):
    refused(f"{variable}: ", words, **{variable: text})


def test_a_flag_that_cannot_be_is_refused_by_its_name():
    refused("--root: root is 5; it must be a path", flags={"root": 5})
    refused("--keep-last: retention.keep_last is 0", flags={"retention.keep_last": 0})


def test_values_of_several_places_that_contradict_one_another_are_refused_with_all_of_them():
    refused(
        "CKPTMIRROR_RETENTION_KEEP_BEST, ckptmirror.toml:3: retention: metric is set",
        file='\n[retention]\nmetric = "m"\n',
        CKPTMIRROR_RETENTION_KEEP_BEST="0",
    )


def test_a_url_that_may_hold_a_secret_is_not_repeated():
    told = refused("mirrors[0] is not understood", file='mirrors = ["s3://user:hunter2@bucket/x"]')
    assert "hunter2" not in str(told)
