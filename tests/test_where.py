"""Conditions of `tfm cells --where`: what they mean, and what is refused."""

import pytest

from baselines.commands.cells import KINDS
from baselines.where import Condition

ROW = {"method": "tfm", "variant": "tfm-b64-w4", "dataset": "sample-math", "budget": 64, "temperature": 1.0, "seed": 0}
ROW |= {"setting": "t0.6", "depth": None, "traced": True, "reasoning": False, "state": "done"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("method==tfm", True),
        ("method=='tfm' and budget==64", True),
        ("method!=tfm or budget<64", False),
        ("variant==tfm-b64-w4", True),
        ("dataset==sample-math and not reasoning", True),
        ("dataset in (sample-chat, sample-math)", True),
        ("dataset not in [sample-math]", False),
        ("8<=budget<=64", True),
        ("64==budget", True),
        ("tfm==method", True),
        ("temperature>-1", True),
        ("setting=='t0.6'", True),
        ("traced and traced==true", True),
        ("depth==none", True),
        ("depth<=4 or depth>4", False),
        ("not (method==ar or seed!=0)", True),
    ],
)
def test_conditions_read_as_they_are_written(text, expected):
    assert Condition(text, KINDS)(ROW) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "method=tfm",
        "method",
        "__import__('os').system('true')",
        "method.upper()=='TFM'",
        "[m for m in method]",
        "(lambda: 1)()==budget",
        "budget==2**64**64",
        "budget=='64'",
        "method==64",
        "traced==1",
        "budget==true",
        "method is tfm",
        "setting==t0.6",
        "f'{method}'==tfm",
        "budget==(x:=64)",
        "variant==tfm - b64",
        "not " * 5000 + "traced",
        "method==tfm; 1",
    ],
)
def test_conditions_refuse_everything_else(text):
    with pytest.raises(ValueError, match="^where: "):
        Condition(text, KINDS)
