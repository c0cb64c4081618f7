"""The flags of preprocess_data.py, and which of them go together."""

import argparse
import difflib
import os

from conversation_forms import FORMS
from preprocess_input import FlagError
from turn_templates import COLUMNS, TEMPLATES, columns_of

OF_BOTH = ("image_folder", "max_length", "video_fps", "video_num_frames", "max_samples", "image_max_pixels",
           "image_min_pixels", "fix_mistral_regex")  # conversations and preferences
OF_CONVERSATIONS = ("conversation_form", "mask_history", "training_form", "template")
OF_TEMPLATES = ("columns", "cutoff_length", "learn_questions", "strip_text", "disable_thinking")


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, without the usage."""

    def error(self, message):
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in message.split() if message.startswith("unrecognized") else ():
            for near in difflib.get_close_matches(word.split("=")[0], known, 1):
                message += f"; did you mean {near}?"
        raise FlagError(message + "; --help lists the flags")


def parse_arguments():
    parser = Parser(description="Text to tokens: JSON lines or plain text in, PREFIX_KEY_document.bin and .idx in "
                                "Megatron's format out.")
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE",
                        help="input files, packed by gzip or not; patterns such as 'part*.jsonl.gz' are expanded")
    parser.add_argument("--input-format", choices=("jsonl", "text", "conversations", "preferences"),
                        default="jsonl",
                        help="jsonl: one JSON object a line, or an array of them; text: documents divided by blank "
                        "lines; "
                             "conversations: the same of conversations, with images and videos or without, into "
                             "PREFIX.vision.safetensors; preferences: the same of questions with a chosen and a "
                             "rejected answer, or with an answer that is good or bad")
    parser.add_argument("--conversation-form", choices=tuple(FORMS),
                        help="conversations only: the records' form, {\"messages\": [...]}, {\"conversations\": "
                        "[{\"from\": ...}]}, {\"instruction\": ...} or {\"prompt\": ..., \"completion\": ...} "
                        "(default: that of the first record)")
    parser.add_argument("--image-folder", metavar="DIR",
                        help="conversations, preferences: where relative paths of images and videos begin (default: "
                        "the input file's folder)")
    parser.add_argument("--video-fps", type=float, metavar="F",
                        help="conversations, preferences: take so many frames of a second of video (default: what the "
                        "model's processor says)")
    parser.add_argument("--video-num-frames", type=int, metavar="N",
                        help="conversations, preferences: take so many frames of every video")
    parser.add_argument("--max-length", type=int, metavar="N",
                        help="conversations, preferences: leave out longer ones, in tokens with pictures; of a pair "
                        "both")
    parser.add_argument("--mask-history", action="store_true", default=None,
                        help="conversations only: learn the last answer alone")
    parser.add_argument("--training-form", action="store_true", default=None,
                        help="conversations only: write each answer as the chat template writes the last one, where "
                        "the template repeats answers otherwise later, such as Qwen3's without their reasoning")
    parser.add_argument("--template", choices=tuple(TEMPLATES),
                        help="conversations only: tokenise turn by turn, as LLaMA-Factory and MindSpeed-MM do, instead "
                        "of by the model's chat template; <image> in the text stands for a picture, <audio> for a "
                        "clip of sound")
    parser.add_argument("--columns", nargs="+", metavar="KEY=NAME",
                        help="with --template: where a record has its turns, and what they call their parts: "
                        + " ".join(f"{key}={name}" for key, name in COLUMNS.items()))
    parser.add_argument("--cutoff-length", type=int, metavar="N", help="with --template: cut longer ones, in tokens")
    parser.add_argument("--image-max-pixels", type=int, metavar="N",
                        help="conversations, preferences: make larger images smaller: instead of the model's "
                        "processor's own limit, with --template before it")
    parser.add_argument("--image-min-pixels", type=int, metavar="N",
                        help="conversations, preferences: likewise make smaller ones larger")
    parser.add_argument("--learn-questions", action="store_true", default=None,
                        help="with --template: learn questions too")
    parser.add_argument("--disable-thinking", action="store_true", default=None,
                        help="with --template qwen3_omni: take thoughts out of the answers, and do not learn the empty "
                        "ones that answers without thoughts get")
    parser.add_argument("--strip-text", action="store_true", default=None,
                        help="with --template: take blanks and line breaks from the ends of every turn")
    parser.add_argument("--fix-mistral-regex", action="store_true", default=None,
                        help="conversations, preferences: correct how the tokenizer.json of a Mistral model cuts text "
                        "into words, as transformers' fix_mistral_regex=True does")
    parser.add_argument("--max-samples", type=int, metavar="N",
                        help="conversations, preferences: take the first N")
    parser.add_argument("--kto-batch-size", type=int, metavar="N",
                        help="preferences only: TRL's per_device_train_batch_size: among so many answers with a label, "
                        "in the file's order, each gets another question (default: 8)")
    parser.add_argument("--skip-bad-records", action="store_true", default=None,
                        help="leave out records that are wrong, and say how many (default: the first of them is an "
                        "error)")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                        help="keys to tokenise, each into files of its own (default: text)")
    parser.add_argument("--lines-per-document", type=int, metavar="N",
                        help="text only: end a document every N lines instead of at blank lines")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX",
                        help="writes PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", metavar="TYPE",
                        help="HuggingFaceTokenizer is the one there is")
    parser.add_argument("--tokenizer-model", required=True, metavar="PATH",
                        help="a tokenizer.json, or a Hugging Face model directory that has one")
    parser.add_argument("--append-eod", action="store_true",
                        help="end every document with the end-of-document token")
    parser.add_argument("--eod-token", metavar="TOKEN",
                        help="that token; default: the directory's eos token")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenise")
    parser.add_argument("--partitions", type=int, default=1, metavar="N",
                        help="accepted for Megatron's sake; the input needs no partitions here")
    parser.add_argument("--log-interval", type=int, default=10000, metavar="N",
                        help="documents between two lines of progress where it is not a terminal")
    parser.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.split_sentences:
        raise FlagError("--split-sentences is for BERT-like models and not supported; leave it out")
    if arguments.tokenizer_type != "HuggingFaceTokenizer":
        raise FlagError(f"--tokenizer-type {arguments.tokenizer_type} is not supported; use "
                         "HuggingFaceTokenizer with a tokenizer.json")
    if arguments.workers < 1 or arguments.log_interval < 1:
        raise FlagError("--workers and --log-interval must be at least 1")
    conversations = arguments.input_format in ("conversations", "preferences")
    of_format = {**dict.fromkeys(OF_CONVERSATIONS + OF_TEMPLATES, "conversations"), "kto_batch_size": "preferences"}
    for name in (*OF_BOTH, *of_format):
        if getattr(arguments, name) is None:
            continue
        flag, wanted = f"--{name.replace('_', '-')}", of_format.get(name, "conversations")
        if not conversations or name in of_format and wanted != arguments.input_format:
            raise FlagError(f"{flag} belongs to --input-format {wanted}")
    if arguments.skip_bad_records and arguments.input_format == "text":
        raise FlagError("--skip-bad-records is about records of JSON, and --input-format text has none; leave it out")
    if arguments.template and arguments.training_form:
        raise FlagError("--training-form is about the model's chat template, and --template takes its place; give one")
    for name in OF_TEMPLATES:
        if not arguments.template and getattr(arguments, name) is not None:
            raise FlagError(f"--{name.replace('_', '-')} needs --template, of {', '.join(TEMPLATES)}")
    for name in ("cutoff_length", "image_max_pixels", "max_samples"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise FlagError(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.template and (arguments.conversation_form or arguments.video_fps or arguments.video_num_frames):
        raise FlagError("--conversation-form, --video-fps and --video-num-frames do not go with --template, which "
                        "reads by --columns, and no videos")
    try:
        columns_of(arguments.columns)
    except ValueError as error:
        raise FlagError(f"--columns: {error}") from None
    if arguments.video_fps is not None and arguments.video_num_frames is not None:
        raise FlagError("--video-fps and --video-num-frames exclude each other; give one of them")
    if any(value is not None and not 0 < value < float("inf") for value in (arguments.video_fps,
                                                                            arguments.video_num_frames)):
        raise FlagError("--video-fps and --video-num-frames must be above 0")
    if arguments.kto_batch_size is not None and arguments.kto_batch_size < 2:
        raise FlagError(f"--kto-batch-size is {arguments.kto_batch_size}; among fewer than 2 answers there is no other")
    if arguments.max_length is not None and arguments.max_length < 2:
        raise FlagError(f"--max-length is {arguments.max_length}; a conversation has at least 2 tokens")
    if conversations and (arguments.append_eod or arguments.eod_token):
        raise FlagError(f"--append-eod and --eod-token have no place in {arguments.input_format}: the chat template "
                        "ends the turns")
    if arguments.eod_token and not arguments.append_eod:
        raise FlagError("--eod-token needs --append-eod, which writes it")
    folder, name = os.path.split(arguments.output_prefix)
    if not name:
        raise FlagError(f"--output-prefix {arguments.output_prefix} is a folder; give a name in it, such as "
                        f"{os.path.join(folder, 'corpus')}")
    if folder and not os.path.isdir(folder):
        raise FlagError(f"the folder {folder} of --output-prefix does not exist; create it first")
    if arguments.lines_per_document is not None and (arguments.input_format != "text" or
                                                     arguments.lines_per_document < 1):
        raise FlagError("--lines-per-document takes a number of at least 1 and --input-format text")
    return arguments
