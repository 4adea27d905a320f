import json

from tests.cli.test_main import fails

import piper as piper_package

TEXT = "0F0,0F1,0B0,(0B1;0F2)OVERLAP_F_B,0B2\n1F0,1B0,1F1,1I1,1W1,1F2,1B2\n"


def test_there_and_back(piper, tmp_path):
    source, strategy, again = (tmp_path / n for n in ("in.csv", "strategy.json", "again.csv"))
    source.write_text(TEXT)
    there = piper("convert", source, strategy)
    assert there.exit_code == 0, there.stderr
    assert there.stdout == f"{strategy}: 2 stages on 2 devices, rank r on device r\n"
    directives = piper_package.load_strategy(strategy)
    assert [type(d).__name__ for d in directives] == ["Place", "Place", "Split", "Order", "Order"]
    assert piper("convert", strategy, again).stdout == f"{again}: 2 ranks\n"
    assert again.read_text() == TEXT


def test_tags(piper, tmp_path):
    source, strategy, again = (tmp_path / n for n in ("in.csv", "strategy.json", "again.csv"))
    source.write_text(TEXT)
    tags = ("--stage-tag", "LAYER", "--microbatch-tag", "SAMPLE")
    assert piper("convert", source, strategy, *tags).exit_code == 0
    assert json.loads(strategy.read_text())[-1]["filters"][0] == [
        {"LAYER": 1, "SAMPLE": 0, "PASS": "F"}
    ]
    assert piper("convert", strategy, again, "--stage-tag", "LAYER").exit_code == 0
    assert again.read_text() == TEXT


def test_what_is_left_out_is_said(piper, tmp_path):
    groups = [[0, 1], [2, 3]]
    strategy = piper_package.strategies.pipeline("zb_h1", groups, 2, zero=2)
    piper_package.dump_strategy(strategy, tmp_path / "in.json")
    result = piper("convert", tmp_path / "in.json", tmp_path / "out.csv")
    assert result.stdout == f"{tmp_path / 'out.csv'}: 2 ranks; left out: 1 Replicate\n"


def test_a_mistake_names_file_row_and_cell(piper, tmp_path):
    source, target = tmp_path / "in.csv", tmp_path / "out.json"
    source.write_text(TEXT.replace("1F1", "1F0"))
    message = fails(piper("convert", source, target))
    assert f"{source}: rank 1 (row 2), cell 3, '1F0': 1F0 is in cell 1 too" in message
    assert not target.exists()


def test_other_extensions_are_refused(piper, tmp_path):
    message = fails(piper("convert", tmp_path / "in.csv", tmp_path / "out.csv"))
    assert "expected a .csv of actions and a .json strategy" in message


def test_a_missing_file_is_named(piper, tmp_path):
    for source, target in (("in.csv", "out.json"), ("in.json", "out.csv")):
        message = fails(piper("convert", tmp_path / source, tmp_path / target))
        assert str(tmp_path / source) in message
