"""Changing versions and parameters of a config.pbtxt that a person may have written."""

import pytest

from model_builder.config import render
from model_builder.pbtxt import edit
from serving.errors import ConfigError
from serving.triton_client import parse_config
from tests.unit.test_model_builder_config import CONFIG

OWN = """# Mine: 4 instances { on purpose ]
name: "mood"   # not "version_policy { }"
platform: 'onnxruntime_onnx'
version_policy: { latest: { num_versions: 2 } }
parameters: { key: "note" value: { string_value: "a } brace and \\"quotes\\"" } }
parameters {
  key: "serve_version"
  value { string_value: "1" }
}
parameters [ { key: "a" value { string_value: "b" } }, { key: "c" value { string_value: "d" } } ]
max_batch_size: 8
"""


def test_only_versions_and_the_named_parameters_change_and_comments_stay() -> None:
    edited = edit(OWN, ["10", "9"], {"serve_version": "10"})
    before, after = parse_config(OWN), parse_config(edited)
    assert after.pop("version_policy") == {"specific": {"versions": ["9", "10"]}}
    before.pop("version_policy")
    assert after["parameters"].pop("serve_version") == {"string_value": "10"}
    before["parameters"].pop("serve_version")
    assert after == before
    assert edited.startswith('# Mine: 4 instances { on purpose ]\nname: "mood"   # not "version_policy { }"\n')


@pytest.mark.parametrize("bulk", [False, True])
def test_an_edit_of_what_the_builder_writes_can_be_repeated_and_undone(bulk: bool) -> None:
    text = render(CONFIG, bulk=bulk)
    parameters = {} if bulk else {"serve_version": "2"}
    edited = edit(text, ["2"], parameters)
    assert edit(edited, ["2"], parameters) == edited
    back = edit(edited, ["1"], dict.fromkeys(parameters, "1"))
    assert parse_config(back) == parse_config(text)


def test_a_parameter_inside_a_list_with_others_is_named() -> None:
    with pytest.raises(ConfigError, match="give parameter a a `parameters"):
        edit(OWN, ["1"], {"a": "x"})


@pytest.mark.parametrize("text", ["name: ", 'name: "m" input [ { name: "x" ]', "colour: 3"])
def test_what_is_no_config_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(edit(text, ["1"], {}))
    assert "\n" not in str(refused.value)
