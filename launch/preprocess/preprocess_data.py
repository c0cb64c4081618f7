#!/usr/bin/env python3
"""Text to tokens: JSON lines or plain text in, PREFIX_KEY_document.bin and .idx in Megatron's format out.

The flags are those of Megatron's tools/preprocess_data.py. Needs the Hugging Face `tokenizers` package only;
conversations (--input-format conversations, preprocess_conversations.py) need `transformers`, images `Pillow`, videos
`av` too. """

import argparse
import array
import difflib
import json
import os
import struct
import sys
from pathlib import Path

from preprocess_input import (FlagError, InputError, Progress, in_workers, input_files, lines_of, model_folder,
                              records_of, whole_text)
from turn_templates import COLUMNS, TEMPLATES, columns_of

OF_TEMPLATES = ("columns", "cutoff_length", "learn_questions", "strip_text")
DTYPE_CODES = {"H": 8, "i": 4}  # array type codes of uint16 and int32 -> the codes in an .idx file
CHUNK_DOCUMENTS = 64  # documents that a worker takes at a time
CONVERSATION_KEYS = {"messages", "conversations", "instruction"}  # of conversation_forms.py


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message):
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in message.split() if message.startswith("unrecognized") else ():
            for near in difflib.get_close_matches(word.split("=")[0], known, 1):
                message += f"; did you mean {near}?"
        raise FlagError(message + "; --help lists the flags")


def parse_arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE",
                        help="input files, packed by gzip or not; patterns such as 'part*.jsonl.gz' are expanded")
    parser.add_argument("--input-format", choices=("jsonl", "text", "conversations"), default="jsonl",
                        help="jsonl: one JSON object a line, or an array of them; text: documents divided by blank "
                        "lines; "
                             "conversations: the same of conversations, with images and videos or without, into "
                             "PREFIX.vision.safetensors")
    parser.add_argument("--conversation-form", choices=("messages", "sharegpt", "alpaca"),
                        help="conversations only: the records' form, {\"messages\": [...]}, {\"conversations\": "
                        "[{\"from\": ...}]} or "
                             "{\"instruction\": ...} (default: that of the first record)")
    parser.add_argument("--image-folder", metavar="DIR",
                        help="conversations only: where relative paths of images and videos begin (default: the input "
                        "file's folder)")
    parser.add_argument("--video-fps", type=float, metavar="F",
                        help="conversations only: take so many frames of a second of video (default: what the model's "
                        "processor says)")
    parser.add_argument("--video-num-frames", type=int, metavar="N",
                        help="conversations only: take so many frames of every video")
    parser.add_argument("--max-length", type=int, metavar="N",
                        help="conversations only: leave out longer ones, in tokens with pictures")
    parser.add_argument("--mask-history", action="store_true", default=None,
                        help="conversations only: learn the last answer alone")
    parser.add_argument("--template", choices=tuple(TEMPLATES),
                        help="conversations only: tokenise turn by turn, as LLaMA-Factory and MindSpeed-MM do, instead "
                        "of by the model's chat template; <image> in the text stands for a picture")
    parser.add_argument("--columns", nargs="+", metavar="KEY=NAME",
                        help="with --template: where a record has its turns, and what they call their parts: "
                        + " ".join(f"{key}={name}" for key, name in COLUMNS.items()))
    parser.add_argument("--cutoff-length", type=int, metavar="N", help="with --template: cut longer ones, in tokens")
    parser.add_argument("--image-max-pixels", type=int, metavar="N",
                        help="conversations only: make larger images smaller: instead of the model's processor's own "
                        "limit, with --template before it")
    parser.add_argument("--image-min-pixels", type=int, metavar="N",
                        help="conversations only: likewise make smaller ones larger")
    parser.add_argument("--learn-questions", action="store_true", default=None,
                        help="with --template: learn questions too")
    parser.add_argument("--strip-text", action="store_true", default=None,
                        help="with --template: take blanks and line breaks from the ends of every turn")
    parser.add_argument("--max-samples", type=int, metavar="N",
                        help="conversations only: take the first N")
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
    conversations = arguments.input_format == "conversations"
    theirs = ("conversation_form", "image_folder", "max_length", "video_fps", "video_num_frames", "mask_history",
              "template", "max_samples", "image_max_pixels", "image_min_pixels", *OF_TEMPLATES)
    for name in theirs:
        if not conversations and getattr(arguments, name) is not None:
            raise FlagError(f"--{name.replace('_', '-')} belongs to --input-format conversations")
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
    if arguments.max_length is not None and arguments.max_length < 2:
        raise FlagError(f"--max-length is {arguments.max_length}; a conversation has at least 2 tokens")
    if conversations and (arguments.append_eod or arguments.eod_token):
        raise FlagError("--append-eod and --eod-token have no place in conversations: the chat template ends the turns")
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


def tokenizer_file(model):
    path = model_folder("--tokenizer-model", model)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir() and any((path / name).exists() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise FlagError(f"{path} has a tokenizer, but no tokenizer.json; write one with transformers: "
                        f"AutoTokenizer.from_pretrained(\"{path}\").save_pretrained(\"{path}\")")
    raise FlagError(f"there is no tokenizer at {file}; --tokenizer-model takes a tokenizer.json "
                    "or a directory that has one")


def load_tokenizer(file):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(f"{sys.executable} has no package tokenizers; install it with "
                         "`pip install tokenizers`, or run this with the Python of the venv "
                         "that launch/setup made") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        raise InputError(f"{file} is not a tokenizer that the package tokenizers reads: {error}; give the "
                         f"tokenizer.json of a "
                         "Hugging Face model") from None
    # Whole documents go into the files: a length limit for a model's input has no place here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def eod_id(tokenizer, file, token):
    """The id that ends documents: --eod-token, else the eos token that the model's files name."""
    if token is None:
        token = read_json(file.parent / "tokenizer_config.json").get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
    if token is not None:
        number = tokenizer.token_to_id(token)
        if number is None:
            raise FlagError(f"the tokenizer has no token {token!r}; choose another --eod-token")
        return number
    for name in ("generation_config.json", "config.json"):
        number = read_json(file.parent / name).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            return number
    raise FlagError(f"nothing beside {file} names an end-of-document token for --append-eod; "
                    "give one with --eod-token")


def json_documents(file, keys):
    """A dict key -> list of texts for each line; a text becomes one sequence of the document."""
    for number, item in records_of(file):
        if not isinstance(item, dict):
            raise InputError(f"{file}, line {number}, is not a JSON object such as "
                             "{\"text\": \"...\"}; correct or delete it")
        document = {}
        for key in keys:
            if key not in item:
                how = "give --input-format conversations" if CONVERSATION_KEYS & item.keys() else "set --json-keys"
                raise InputError(f"{file}, line {number}, has no key {key!r} (it has "
                                 f"{', '.join(sorted(item)) or 'none'}); {how}")
            texts = item[key] if isinstance(item[key], list) else [item[key]]
            if not all(isinstance(text, str) for text in texts):
                talk = key in CONVERSATION_KEYS
                how = "give --input-format conversations" if talk else "set --json-keys to one that is"
                raise InputError(f"{file}, line {number}: the value of {key!r} is no text; {how}")
            for text in texts:
                whole_text(f"{file}, line {number}", text)
            document[key] = texts
        yield document


def text_documents(file, key, lines_per_document):
    """Paragraphs, or blocks of so many lines that are not blank."""
    lines = []
    for _, line in lines_of(file):
        blank = not line.strip()
        if not blank:
            lines.append(line.rstrip("\n"))
        full = blank if lines_per_document is None else len(lines) == lines_per_document
        if full and lines:
            yield {key: ["\n".join(lines)]}
            lines = []
    if lines:
        yield {key: ["\n".join(lines)]}


def documents_of(arguments, files):
    for file in files:
        if arguments.input_format == "jsonl":
            yield from json_documents(file, arguments.json_keys)
        else:
            yield from text_documents(file, arguments.json_keys[0], arguments.lines_per_document)


def chunks_of(documents):
    chunk = []
    for document in documents:
        chunk.append(document)
        if len(chunk) == CHUNK_DOCUMENTS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class Encoder:
    """Tokenises chunks of documents; each worker process has one."""

    def __init__(self, file, type_code, eod):
        self.tokenizer = load_tokenizer(file)
        self.type_code = type_code
        self.eod = eod

    def encode(self, chunk):
        """Per key: the tokens as bytes, and for each document the lengths of its sequences."""
        result = {}
        for key in chunk[0]:
            texts = [text for document in chunk for text in document[key]]
            encoded = iter(self.tokenizer.encode_batch(texts))
            tokens, lengths = array.array(self.type_code), []
            for document in chunk:
                ids = [next(encoded).ids for _ in document[key]]
                ids = [sequence for sequence in ids if sequence]
                if ids and self.eod is not None:
                    ids[-1] = ids[-1] + [self.eod]
                for sequence in ids:
                    tokens.extend(sequence)
                lengths.append([len(sequence) for sequence in ids])
            result[key] = (tokens.tobytes(), lengths)
        return result, len(chunk)


class Writer:
    """PREFIX.bin and .idx; they get their names in finish(), so that half a set never looks whole."""

    def __init__(self, prefix, type_code):
        self.prefix, self.type_code = prefix, type_code
        self.width = array.array(type_code).itemsize
        self.lengths, self.documents, self.tokens = array.array("i"), array.array("q", [0]), 0
        self.bin = open(prefix + ".bin.partial", "wb")

    def add(self, data, lengths):
        self.bin.write(data)
        self.tokens += len(data) // self.width
        for document in lengths:
            self.lengths.extend(document)
            self.documents.append(len(self.lengths))

    def finish(self):
        self.bin.close()
        with open(self.prefix + ".idx.partial", "wb") as file:
            file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, DTYPE_CODES[self.type_code]))
            file.write(struct.pack("<QQ", len(self.lengths), len(self.documents)))
            self.lengths.tofile(file)
            offset, offsets = 0, array.array("q")
            for length in self.lengths:
                offsets.append(offset)
                offset += length * self.width
            offsets.tofile(file)
            self.documents.tofile(file)
        for suffix in (".bin", ".idx"):
            os.replace(self.prefix + suffix + ".partial", self.prefix + suffix)

    def discard(self):
        self.bin.close()
        for suffix in (".bin.partial", ".idx.partial"):
            if os.path.exists(self.prefix + suffix):
                os.remove(self.prefix + suffix)


def preprocess(arguments):
    files = input_files(arguments.input)
    file = tokenizer_file(arguments.tokenizer_model)
    tokenizer = load_tokenizer(file)
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    type_code = "H" if vocab_size < 65500 else "i"
    eod = eod_id(tokenizer, file, arguments.eod_token) if arguments.append_eod else None
    keys = arguments.json_keys if arguments.input_format == "jsonl" else arguments.json_keys[:1]
    writers = {}
    progress = Progress(arguments.log_interval)
    try:
        for key in keys:
            writers[key] = Writer(f"{arguments.output_prefix}_{key}_document", type_code)
        chunks = chunks_of(documents_of(arguments, files))
        for encoded, documents in in_workers(arguments.workers, Encoder, (file, type_code, eod), chunks):
            for key, (data, lengths) in encoded.items():
                writers[key].add(data, lengths)
            progress.add(documents, sum(writer.tokens for writer in writers.values()))
        for key, writer in writers.items():
            if writer.tokens == 0:
                raise InputError(f"the input holds no text at all for {key!r}; check --input")
        for writer in writers.values():
            writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    finally:
        progress.end()
    for key, writer in writers.items():
        print(f"wrote {writer.prefix}.bin and .idx: {progress.documents} documents, {writer.tokens} "
              f"tokens, vocabulary of {vocab_size}; train with --data-path {writer.prefix}")


def main():
    try:
        arguments = parse_arguments()
        if arguments.input_format == "conversations":
            import preprocess_conversations
            preprocess_conversations.preprocess(arguments)
        else:
            preprocess(arguments)
    except InputError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, FlagError) else 1)
    except OSError as error:
        sys.exit(f"preprocess_data: {error.filename or 'output'}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("preprocess_data: interrupted; nothing was written")


if __name__ == "__main__":
    main()
