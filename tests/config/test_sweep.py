"""Settings: changes of one evaluation, checked before anything is loaded."""

from __future__ import annotations

import pytest

from mmrl.config.schema import ConfigError, EvaluateConfig, Piece, parse
from mmrl.config.sweep import setting_of, settings_of

BASE = {
    "policy": "tests.support.toys:ToyText",
    "evaluation": {
        "data": "tests.support.toys:prompts",
        "engine": ["tests.support.toys:ToyGenerate", {"name": "with_demos", "per_group": 1}],
        "rewards": ["tests.support.toys:brevity"],
    },
}


def made(**settings):
    return parse({**BASE, "settings": settings}, EvaluateConfig)


def test_dotted_and_nested_changes_say_the_same():
    both = settings_of(
        made(
            dotted={"policy.length": 2, "evaluation.engine.1.per_group": 3},
            nested={"policy": {"length": 2}, "evaluation": {"engine": {"1": {"per_group": 3}}}},
        )
    )
    assert both["dotted"] == both["nested"]
    assert both["dotted"].policy == Piece("tests.support.toys:ToyText", {"length": 2})
    assert both["dotted"].evaluation.engine[1] == Piece("with_demos", {"per_group": 3})
    assert both["dotted"].evaluation.engine[0] == Piece("tests.support.toys:ToyGenerate")


def test_no_change_is_a_setting_and_settings_do_not_touch_each_other():
    config = made(long={"policy.length": 9}, full={})
    assert list(settings_of(config)) == ["long", "full"]
    assert settings_of(config)["full"].policy == config.policy
    assert settings_of(config)["full"].settings == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polcy.length": 2}, "settings.one: there is no key 'polcy'; did you mean 'policy'?"),
        ({"evaluation.engin": []}, "there is no key 'evaluation.engin'; did you mean 'engine'?"),
        ({"evaluation.engine.2.per_group": 1}, "settings.one: there is no item 2 in a list of 2"),
        ({"seed": 1}, "settings.one changes 'seed', but settings are compared on the same prompts"),
        ({"evaluation.num_prompts": 1}, "settings.one changes 'evaluation'"),
        ({"evaluation.rewards": ["tests.support.toys:share_right"]}, "settings.one changes 'evaluation'"),
        ({"settings.two": {}}, "settings.one changes 'settings'"),
    ],
)
def test_what_a_setting_may_not_change_is_said(changes, message):
    with pytest.raises(ConfigError) as raised:
        settings_of(made(one=changes))
    assert message in str(raised.value)


def test_one_setting_is_found_by_its_name():
    config = made(full={}, long={"policy.length": 9})
    assert setting_of(config, "long") == settings_of(config)["long"]
    with pytest.raises(ConfigError, match="there is no setting 'lang'; did you mean 'long'?"):
        setting_of(config, "lang")
    with pytest.raises(ConfigError, match="there is no setting 'x'; there are none"):
        setting_of(made(), "x")
