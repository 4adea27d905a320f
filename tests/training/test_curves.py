import io
import math

import pytest
from rich.console import Console

from piper.training.curves import Curve, loss_curves


def rows(curves, width=20, height=6):
    """The drawing area of each row of characters."""
    lines = loss_curves(curves, width, height).plain.splitlines()
    return [line.split("┤")[1] for line in lines[:height]]


def test_a_falling_loss_falls_from_left_to_right():
    area = rows([Curve(label="train", points=[(0, 5.0), (50, 3.0), (100, 1.0)])])
    first = [next(row for row in range(6) if area[row][column] != " ") for column in range(20)]
    assert first[0] == 0
    assert first[-1] == 5
    assert first == sorted(first)


def test_marks_stand_where_the_points_are():
    points = [(0, 4.0), (100, 2.0)]
    area = rows([Curve(label="held out", points=points, marks=True)])
    assert area[0][0] == "●"
    assert area[5][19] == "●"
    assert sum(row.count("●") for row in area) == 2


def test_labels_and_last_values_are_shown():
    text = loss_curves(
        [
            Curve(label="train", points=[(1, 5.0), (400, 2.0)]),
            Curve(label="held out", points=[(400, 2.25)], marks=True),
        ]
    ).plain
    assert "train 2.000" in text
    assert "held out 2.250" in text
    assert text.splitlines()[-2].split() == ["1", "400"]


@pytest.mark.parametrize("points", [[(3, 2.0)], [(0, 2.0), (9, 2.0)]])
def test_one_point_or_a_flat_curve_is_drawn(points):
    assert any(row.strip() for row in rows([Curve(label="train", points=points)]))


def test_nothing_recorded_is_said():
    assert loss_curves([Curve(label="train", points=[])]).plain == "no loss recorded yet"


def test_the_drawing_fits_its_width():
    curves = [Curve(label="train", points=[(0, 5.0), (100, 1.0)])]
    out = io.StringIO()
    Console(file=out, width=84).print(loss_curves(curves, width=72))
    assert len(out.getvalue().splitlines()) == 12 + 3


def test_losses_that_are_no_numbers_are_not_drawn():
    points = [(1, 4.0), (2, 3.0), (3, math.inf), (4, math.nan)]
    finite = loss_curves([Curve(label="x", points=points[:2])], width=20, height=4).plain
    drawn = loss_curves([Curve(label="x", points=points)], width=20, height=4).plain
    assert drawn.splitlines()[:-1] == finite.splitlines()[:-1]
    assert drawn.splitlines()[-1].endswith("x nan")
    assert loss_curves([Curve(label="x", points=points[2:])]).plain == "no loss recorded yet"
