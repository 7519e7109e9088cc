"""The draft flags and the settings that they stand for: bmoe/cli/draft_flags.py."""

from __future__ import annotations

import argparse
import shlex

import pytest

from bmoe.cli.draft_flags import add_draft_flags, spec_from_args
from bmoe.errors import UsageError
from bmoe.speculation import DraftSpec, MapConfig, ModConfig, NgramConfig


def parse(line: str) -> DraftSpec:
    parser = argparse.ArgumentParser()
    add_draft_flags(parser.add_argument_group("drafting"))
    return spec_from_args(parser.parse_args(shlex.split(line)))


def test_defaults_are_llama_cpps() -> None:
    spec = parse("--spec-type ngram-mod,ngram-map-k,ngram-map-k4v,ngram-simple,ngram")
    assert spec == DraftSpec(types=("ngram-mod", "ngram-map-k", "ngram-map-k4v", "ngram-simple", "ngram"))
    assert spec.ngram_mod == ModConfig(n_match=24, n_min=48, n_max=64)
    assert spec.ngram_map_k == spec.ngram_map_k4v == spec.ngram_simple == MapConfig(size_n=12, size_m=48, min_hits=1)
    assert spec.ngram == NgramConfig(n_max=3, min_match=3)
    assert spec.draft == 3
    assert spec.n_max is None


def test_flags() -> None:
    assert parse("") == parse("--spec-type none") == DraftSpec()
    assert parse("--ngram") == parse("--spec-type ngram") == parse("--ngram --spec-type ngram")
    assert parse("--ngram --draft 64 --ngram-min-match 5 --ngram-max-match 9").ngram == NgramConfig(64, 5, 9)
    assert parse("--draft 5").draft == 5  # mtp's, too
    assert parse("--mtp") == parse("--spec-type mtp") == parse("--mtp --spec-type mtp") == DraftSpec(types=("mtp",))
    assert parse("--mtp --ngram").ordered() == ("ngram", "mtp")
    assert parse("--mtp --draft 5 --mtp-p-min 0.4") == DraftSpec(types=("mtp",), draft=5, mtp_p_min=0.4)
    assert parse("--mtp --draft 5").longest() == 5
    assert parse("--mtp --draft 5 --spec-draft-n-max 2").longest() == 2
    assert parse("--spec-type ngram-mod,mtp").longest() == 64
    assert parse("--spec-draft-n-max 0 --ngram").longest() == 0
    spec = parse(
        "--spec-type ngram-map-k4v,ngram-mod --spec-ngram-map-k4v-size-n 8 --spec-ngram-map-k4v-size-m 9"
        " --spec-ngram-map-k4v-min-hits 2 --spec-ngram-mod-n-match 16 --spec-ngram-mod-n-min 2"
        " --spec-ngram-mod-n-max 32 --spec-draft-n-max 20"
    )
    assert spec.ngram_map_k4v == MapConfig(8, 9, 2)
    assert spec.ngram_mod == ModConfig(16, 2, 32)
    assert spec.n_max == spec.longest() == 20
    for name in ("simple", "map-k"):
        spec = parse(
            f"--spec-type ngram-{name} --spec-ngram-{name}-size-n 3 --spec-ngram-{name}-size-m 99"
            f" --spec-ngram-{name}-min-hits 4"
        )
        assert spec.config(f"ngram-{name}") == MapConfig(3, 99, 4)
        assert spec.longest() == 99


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--spec-type ngram-cache", "--spec-type: 'ngram-cache' is none of none, ngram-simple"),
        ("--spec-type none,ngram", "--spec-type: none,ngram names none beside other types"),
        ("--spec-type ngram,ngram", "--spec-type: ngram,ngram names a type twice"),
        ("--spec-type ''", "--spec-type: '' is none of"),
        ("--ngram --spec-type ngram-mod", "--ngram is --spec-type ngram, which --spec-type ngram-mod contradicts"),
        ("--ngram --spec-type none", "--ngram is --spec-type ngram, which"),
        ("--mtp --spec-type ngram-mod,mtp", "--mtp is --spec-type mtp, which --spec-type ngram-mod,mtp contradicts"),
        ("--mtp-p-min 0.5", "--mtp-p-min has no effect without --spec-type mtp"),
        ("--mtp --mtp-p-min 1.5", "--mtp-p-min: 1.5 is out of range, give 0 (never stops) to 1"),
        ("--mtp --mtp-p-min nan", "--mtp-p-min: nan is out of range"),
        ("--mtp --draft 0", "--draft: 0 is out of range"),
        ("--ngram-min-match 3", "--ngram-min-match has no effect without --spec-type ngram"),
        ("--ngram --spec-ngram-mod-n-max 9", "--spec-ngram-mod-n-max has no effect without --spec-type ngram-mod"),
        ("--ngram --draft 0", "--draft: 0 is out of range, give 1 to 1024"),
        ("--draft 1025", "--draft: 1025 is out of range"),
        ("--ngram --spec-draft-n-max -1", "--spec-draft-n-max: -1 is out of range, give 0 to 1024"),
        ("--ngram --ngram-min-match 0", "--ngram-min-match: 0 is out of range"),
        ("--ngram --ngram-min-match 17", "--ngram-max-match: 16 is below --ngram-min-match 17"),
        ("--spec-type ngram-map-k --spec-ngram-map-k-min-hits 0", "--spec-ngram-map-k-min-hits: 0 is out of range"),
        ("--spec-type ngram-simple --spec-ngram-simple-size-n 1025", "--spec-ngram-simple-size-n: 1025 is out of"),
        (
            "--spec-type ngram-mod --spec-ngram-mod-n-max 47",
            "--spec-ngram-mod-n-min: 48 is above --spec-ngram-mod-n-max",
        ),
        ("--spec-type ngram-mod --spec-ngram-mod-n-max 1025", "--spec-ngram-mod-n-max: 1025 is out of range"),
    ],
)
def test_flags_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("policy", ["adaptive", "always"])
def test_draft_policy_flag(policy: str) -> None:
    assert parse(f"--ngram --draft-policy {policy}").policy == policy
    with pytest.raises(UsageError, match="--draft-policy has no effect without"):
        parse(f"--draft-policy {policy}")
