"""Which tokenizer folders are read without transformers, and that they then give the same tokenizer as with it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from serving.models import tokenizer_sha256
from serving.read_ahead import ReadAhead
from serving.tokenizer_files import is_plain, load_backend, tokenizer_folders

PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "clean_up_tokenization_spaces": False}
TEXT = "good bad [SEP] goodness [PAD]bad"


def write_folder(folder: Path, config: dict[str, Any], special: dict[str, Any] | None = None) -> Path:
    words = ["[UNK]", "[SEP]", "[PAD]", "good", "bad"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A [SEP]", "$A [SEP] $B", [("[SEP]", 1)])
    tokenizer.add_special_tokens([AddedToken("[UNK]"), AddedToken("[SEP]", lstrip=True), AddedToken("[PAD]")])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({}, None),
        ({"unk_token": "[UNK]", "sep_token": "[SEP]"}, None),
        ({"pad_token": "[PAD]", "padding_side": "left"}, {"sep_token": "[SEP]", "unk_token": "[UNK]"}),
        ({"cls_token": None}, {}),
    ],
)
def test_a_plain_folder_gives_what_transformers_makes_of_it(
    tmp_path: Path, config: dict[str, Any], special: dict[str, Any] | None
) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "tokenizer", PLAIN | config, special)
    assert is_plain(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    ours = load_backend(folder)
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())
    for literally in (False, True):
        ours.encode_special_tokens = theirs.encode_special_tokens = literally
        assert ours.encode(TEXT).ids == theirs.encode(TEXT).ids


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({"tokenizer_class": "BertTokenizer"}, None),
        ({"do_lower_case": True}, None),
        ({"add_bos_token": True}, None),
        ({"bos_token": "<s>"}, None),
        ({"sep_token": {"content": "[SEP]", "lstrip": False}}, None),
        ({}, {"mask_token": "[MASK]"}),
        ({}, {"additional_special_tokens": ["<x>"]}),
    ],
)
def test_a_folder_that_says_more_is_left_to_transformers(
    tmp_path: Path, config: dict[str, Any], special: dict[str, Any] | None
) -> None:
    assert not is_plain(write_folder(tmp_path / "tokenizer", PLAIN | config, special))


def test_a_file_that_may_hold_more_tokens_is_left_to_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokenizer", PLAIN)
    (folder / "added_tokens.json").write_text('{"<x>": 5}')
    assert not is_plain(folder)


def test_a_tokenizer_without_a_post_processor_is_left_to_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokenizer", PLAIN)
    definition = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(definition | {"post_processor": None}))
    assert not is_plain(folder)


@pytest.mark.parametrize("absent", ["post_processor", "added_tokens"])
def test_a_file_without_a_part_that_may_be_absent_is_still_a_tokenizer(tmp_path: Path, absent: str) -> None:
    folder = write_folder(tmp_path / "tokenizer", PLAIN)
    definition = json.loads((folder / "tokenizer.json").read_text())
    del definition[absent]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    assert load_backend(folder).encode("good").ids


def test_the_doors_start_without_transformers() -> None:
    code = "import sys, gateway.__main__, batch_consumer.__main__; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_tokenizers_are_read_ahead_the_default_model_first_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "zoo" / "tokenizer", PLAIN)
    version = write_folder(tmp_path / "zoo" / "2" / "tokenizer", PLAIN | {"unk_token": "[UNK]"})
    other = write_folder(tmp_path / "ant" / "tokenizer", PLAIN | {"pad_token": "[PAD]"})
    broken = write_folder(tmp_path / "bee" / "tokenizer", PLAIN)
    (broken / "tokenizer.json").write_text("{")
    assert tokenizer_folders(tmp_path, "zoo") == [version, first, other, broken]

    ahead = ReadAhead(tmp_path, "zoo")
    assert list(ahead.read()) == [tokenizer_sha256(folder) for folder in (version, first, other)]


def test_what_is_not_read_yet_when_triton_comes_is_left_to_who_needs_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "zoo" / "tokenizer", PLAIN)

    async def ask_at_once() -> int:
        async with ReadAhead(tmp_path, "zoo") as ahead:
            return len(await ahead.so_far())

    assert asyncio.run(ask_at_once()) == 0
