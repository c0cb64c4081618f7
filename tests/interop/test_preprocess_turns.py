"""--template: conversations turn by turn, as LLaMA-Factory and MindSpeed-MM tokenise them."""
import json

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megashard import PREPROCESS, USAGE, run
from tiny_vision import (make_glm4v, make_internvl_chat, make_kimi_k25, make_mistral3, make_processors,
                         preprocessing)

COLUMNS = "messages=messages images=images role=role content=content user=user assistant=assistant system_role="
PYTHON = __import__("sys").executable


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def model(folder):
    make_processors(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')
    return folder


def encode(model, item, template="qwen3_vl_nothink", **flags):
    from preprocess_conversations import Encoder

    flags = preprocessing(model, template=template, columns=[*COLUMNS.split(), "system=system"], **flags)
    return Encoder(flags).encode(("in.jsonl, line 2", item, str(model)))


def learnt(sample, tokenizer):
    return tokenizer.decode([token for token, mask in zip(sample.tokens, sample.mask) if mask])


def test_turns_and_pictures_become_tokens(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    item = {"messages": turns("<image> the cat", "sat", "on <image>", "the mat"), "images": ["a.png", "b.jpg"]}
    sample = encode(model, item)
    pictures = [f"<|vision_start|>{'<|image_pad|>' * (rows * columns // 4)}<|vision_end|>"
                for _, rows, columns in sample.images.grids]
    texts = [f"<|im_start|>user\n{pictures[0]} the cat<|im_end|>\n<|im_start|>assistant\n", "sat<|im_end|>\n",
             f"<|im_start|>user\non {pictures[1]}<|im_end|>\n<|im_start|>assistant\n", "the mat<|im_end|>\n"]
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert sample.tokens == sum(pieces, [])
    assert list(sample.mask) == sum(([number % 2] * len(piece) for number, piece in enumerate(pieces)), [])
    last = encode(model, item, mask_history=True)
    assert last.tokens == sample.tokens and learnt(last, tokenizer) == learnt(sample, tokenizer).removeprefix(
        tokenizer.decode(pieces[1])).strip()
    assert all(encode(model, item, learn_questions=True).mask)
    stripped = encode(model, {"messages": turns(" the cat\n", " sat ")}, strip_text=True)
    assert stripped.tokens == encode(model, {"messages": turns("the cat", "sat")}).tokens
    helped = encode(model, {"messages": turns("the", "cat")}, "qwen2vl").tokens
    assert tokenizer.decode(helped).startswith(tokenizer.decode(
        tokenizer("<|im_start|>system\nYou are a helpful assistant.<|im_end|>", add_special_tokens=False)["input_ids"]))


ITEM = {"messages": turns("<image> the cat", "<think>on</think>\n\nsat", "on <image>", "the mat"),
        "images": ["a.png", "b.jpg"]}


@pytest.mark.parametrize("template, make, wanted, unlearnt", [
    ("glm4v_moe", make_glm4v,
     ["[gMASK]<sop>", "<|user|>\n<|begin_of_image|>PICTURE<|end_of_image|> the cat<|assistant|>",
      "<think>\n\n</think>\n\n",
      "\nsat", "<|user|>\non <|begin_of_image|>PICTURE<|end_of_image|><|assistant|>", "<think>\n\n</think>\n\n",
      "\nthe mat", "<|im_end|>"], "the end token is not learnt behind answers other than the last"),
    ("kimi_k25", make_kimi_k25,
     ["<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>",
      "<|im_user|>user<|im_middle|><|media_start|>image<|media_content|>PICTURE<|media_end|> the cat<|im_end|>"
      "<|im_assistant|>assistant<|im_middle|>",
      "\u25c1think\u25b7\n\n\u25c1/think\u25b7\n\n", "<think>on</think>\n\nsat<|im_end|>",
      "<|im_user|>user<|im_middle|>on <|media_start|>image<|media_content|>PICTURE<|media_end|><|im_end|>"
      "<|im_assistant|>assistant<|im_middle|>", "\u25c1think\u25b7\n\n\u25c1/think\u25b7\n\n", "the mat<|im_end|>"],
     None)])
def test_templates_of_other_families(tmp_path, template, make, wanted, unlearnt):
    """Answers are without their own thoughts, behind an empty one that is not learnt; GLM ends with the tokenizer's
    end token alone."""
    make(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    sample = encode(tmp_path, ITEM, template, disable_thinking=True)
    marks = iter([tokenizer.image_token * (rows * columns // 4) for _, rows, columns in sample.images.grids])
    pieces = [tokenizer(text.replace("PICTURE", next(marks)) if "PICTURE" in text else text,
                        add_special_tokens=False)["input_ids"] for text in wanted]
    assert sample.tokens == sum(pieces, [])
    assert list(sample.mask) == sum(([int(i in (3, 6, 7))] * len(piece) for i, piece in enumerate(pieces)), [])
    assert [told[0] for told in sample.told] == ([unlearnt] if unlearnt else [])
    room = len(sample.tokens) - 1
    cut = encode(tmp_path, ITEM, template, cutoff_length=room, disable_thinking=True)
    assert len(cut.tokens) == room and (not unlearnt or cut.tokens[-1] == tokenizer.eos_token_id)


def test_the_template_of_internvl(tmp_path):
    """The head of an answer and its line break are not learnt; a picture needs no mark; tiles are those of
    InternVLChatModel's config.json, which the pictures of a record share; what is too long is cut off."""
    make_internvl_chat(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    alone = [encode(tmp_path, {"messages": turns("the", "cat"), "images": name}, "internvl2_5")
             for name in ITEM["images"]]
    together = encode(tmp_path, ITEM, "internvl2_5")
    tiles = [len(sample.images.grids) for sample in (*alone, together)]
    assert tiles[0] > 1 and sum(tiles[:2]) >= tiles[2] > 2  # at most 12, and 6 for each of two
    mark = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    assert together.tokens.count(mark) == 4 * tiles[2] and together.images.grids[0] == [1, 4, 4]
    texts = (f"<|im_start|>user\n<img>{'<IMG_CONTEXT>' * 4 * tiles[0]}</img>\nthe<|im_end|>\n",
             "<|im_start|>assistant\n", "cat<|im_end|>\n")
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in texts]
    assert alone[0].tokens[-len(sum(pieces, [])):] == sum(pieces, [])  # behind the system's text
    assert learnt(alone[0], tokenizer) == "cat"  # the tokenizer has no line breaks, so its last token is the end mark
    cut = encode(tmp_path, ITEM, "internvl2_5", cutoff_length=len(together.tokens) - 2)
    assert cut.tokens == together.tokens[:-2] and cut.mask == together.mask[:-2]


@pytest.mark.parametrize("template, resample", [("qwen2vl", Image.Resampling.NEAREST),
                                                ("qwen3_vl_nothink", Image.Resampling.BICUBIC)])
@pytest.mark.parametrize("least, most, size", [(None, 150, (15, 9)), (2000, None, (55, 36)), (None, None, None)])
def test_pictures_keep_the_limits_of_their_pixels(model, template, resample, least, most, size):
    from preprocess_conversations import Encoder

    item = {"messages": turns("<image>", "sat"), "images": ["a.png"]}
    made = encode(model, item, template, image_min_pixels=least, image_max_pixels=most).images
    image = Image.open(model / "a.png")  # 13 x 20
    if size is not None:
        wanted = (size[1], size[0]) if image.height > image.width else size
        image = image.resize(wanted, resample)
    if min(image.size) < 28:
        image = image.resize(tuple(max(28, side) for side in image.size))
    assert made == Encoder(preprocessing(model)).pictures.images("", [image])[0]


WRONG_WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def magistral(tmp_path_factory):
    """A mistral3 model's processors, with a byte-level tokenizer that is as large as those transformers corrects."""
    folder = tmp_path_factory.mktemp("magistral")
    make_mistral3(folder)
    tokens = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]",
              "[IMG_BREAK]", "[IMG_END]", "[THINK]", "[/THINK]"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("o", "W"), ("2", "0"), ("a", "t")]
    words = tokens + letters + [one + other for one, other in merges]
    words += [f"unused {number}" for number in range(100_001 - len(words))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WRONG_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(tokens)
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>",
                            eos_token="</s>").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "4.57.0"}))
    return folder


def test_magistral_has_its_own_marks(magistral):
    from preprocess_input import InputError

    tokenizer = AutoTokenizer.from_pretrained(magistral, fix_mistral_regex=True)
    item = {"messages": turns("<image> oWl", "sat 2025", "at <image>?", "the mat"), "images": ["a.png", "b.jpg"],
            "system": "Think."}
    sample = encode(magistral, item, "mistral", fix_mistral_regex=True)

    def row(columns, end):
        return "[IMG]" * columns + end

    pictures = [row(columns // 2, "[IMG_BREAK]") * (rows // 2 - 1) + row(columns // 2, "[IMG_END]")
                for _, rows, columns in sample.images.grids]
    texts = [f"<s>[SYSTEM_PROMPT]Think.[/SYSTEM_PROMPT][INST]{pictures[0]} oWl[/INST]", "sat 2025</s>",
             f"[INST]at {pictures[1]}?[/INST]", "the mat</s>"]
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert sample.tokens == sum(pieces, [])
    assert list(sample.mask) == sum(([number % 2] * len(piece) for number, piece in enumerate(pieces)), [])
    bare = encode(magistral, {"messages": turns("at", "sat")}, "mistral").tokens
    told = tokenizer.decode(bare)
    assert told.startswith("<s>[SYSTEM_PROMPT]First draft your thinking process (inner monologue) until")
    assert told.endswith("a self-contained response.      [/SYSTEM_PROMPT][INST]at[/INST]sat</s>")
    with pytest.raises(InputError, match="--cutoff-length 30 cuts a picture"):
        encode(magistral, item, "mistral", cutoff_length=30)


def test_the_words_of_mistral_are_corrected_as_by_transformers(magistral):
    item = {"messages": turns("oWl 2025", "sat oWl 2025")}
    wrong, right = (encode(magistral, item, "mistral", fix_mistral_regex=fix).tokens for fix in (None, True))
    made = [AutoTokenizer.from_pretrained(magistral, **fix)("sat oWl 2025", add_special_tokens=False)["input_ids"]
            for fix in ({}, {"fix_mistral_regex": True})]
    assert made[0] != made[1]  # 20 of 2025 is one token, oW of oWl, too
    assert [tokens[-len(ids) - 1:-1] for tokens, ids in zip((wrong, right), made)] == made


def test_pictures_of_magistral_are_not_stretched(magistral):
    from preprocess_conversations import Encoder

    item = {"messages": turns("<image>", "sat"), "images": ["a.png"]}
    made = encode(magistral, item, "mistral", image_max_pixels=150).images
    image = Image.open(magistral / "a.png").resize((9, 15), Image.Resampling.NEAREST)  # of 13 x 20
    assert made == Encoder(preprocessing(magistral, template="mistral")).pictures.images("", [image])[0]


@pytest.mark.parametrize("question, answer, room, kept", [
    (10, 4, 20, (10, 4)), (30, 4, 20, (16, 4)), (4, 30, 20, (4, 16)), (30, 30, 20, (10, 10)), (20, 60, 40, (10, 30))])
def test_a_pair_that_is_too_long_is_cut(question, answer, room, kept):
    from turn_templates import shares

    assert shares(question, answer, room) == kept


def test_long_conversations_are_cut_pair_by_pair(model):
    from preprocess_input import InputError

    whole = encode(model, {"messages": turns("the cat", "sat", "on the mat", "the cat sat")})
    cut = encode(model, {"messages": turns("the cat", "sat", "on the mat", "the cat sat")}, cutoff_length=16)
    assert len(cut.tokens) == 16 and cut.tokens[:9] == whole.tokens[:9]
    with pytest.raises(InputError, match="--cutoff-length 12 cuts a picture"):
        encode(model, {"messages": turns("<image> the cat", "sat"), "images": ["a.png"]}, cutoff_length=12)


def test_the_file_says_by_which_flags_it_was_made(model):
    source = model / "chats.json"
    source.write_text(json.dumps([{"messages": turns("the <image>", "cat"), "images": ["a.png"]}] * 3))
    command = [PYTHON, PREPROCESS / "preprocess_data.py", "--input", source, "--output-prefix", model / "set",
               "--tokenizer-model", model, "--input-format", "conversations"]
    done = run(*command, "--template", "qwen2vl", "--columns", *COLUMNS.split(), "--cutoff-length", 64, "--max-samples",
               2, "--mask-history", "--image-max-pixels", 9999)
    assert "2 conversations" in done.stdout
    path = model / "set.vision.safetensors"
    with safe_open(path, "pt") as file:
        flags, inputs = (json.loads(file.metadata()[name]) for name in ("flags", "inputs"))
    assert inputs == {"chats.json": str(source.stat().st_size)}
    assert flags == {"--template": "qwen2vl", "--columns": COLUMNS, "--cutoff-length": "64", "--max-samples": "2",
                     "--mask-history": "", "--image-max-pixels": "9999"}
    assert len(load_file(path)["sample_ends"]) == 2
    for wrong, message in ((["--cutoff-length", 4], "--cutoff-length needs --template, of qwen2vl"),
                           (["--template", "qwen2vl", "--columns", "speaker=x"], "is not KEY=NAME with a key of"),
                           (["--template", "qwen2vl", "--video-fps", 2], "do not go with --template")):
        assert message in run(*command, *wrong, expect=USAGE).stderr


@pytest.mark.parametrize("item, message", [
    ({"messages": turns("the")}, "the turns must be pairs"),
    ({"messages": turns("the <image>", "cat")}, "there are 1 marks <image> for 0 images"),
    ({"messages": turns("the <image>", "cat"), "images": ["none.png"]}, "cannot read the image none.png: No such"),
    ({"messages": turns("the", "cat")[::-1]}, "turn 1 has role 'assistant' instead of 'user'"),
    ({"messages": [{"role": "user"}, {"role": "assistant", "content": "cat"}]}, "a turn has no text 'content'"),
    ({"text": "the"}, "has no list 'messages' of turns"),
    ({"messages": turns("the", "cat"), "kto_tag": False}, "'kto_tag' is of preference data"),
    ({"messages": turns("the", "cat"), "videos": ["a.mp4"]}, "its 'videos' are not read"),
    ({"messages": turns("the", "cat"), "system": ["the"]}, "'system' is no text"),
    ({"messages": turns("the", "\ud83d")}, "has half of a surrogate pair"),
    ({"messages": turns("the", "cat"), "images": [3]}, "'images' is no list of paths"),
], ids=["unpaired", "mark", "missing", "roles", "no text", "no turns", "preference", "videos", "system", "half",
        "path"])
def test_wrong_records_are_named(model, item, message):
    from preprocess_input import InputError

    with pytest.raises(InputError) as refused:
        encode(model, item)
    assert message in str(refused.value) and str(refused.value).startswith("in.jsonl, line 2")
