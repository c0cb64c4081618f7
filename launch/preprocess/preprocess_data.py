#!/usr/bin/env python3
"""Text to tokens: JSON lines or plain text in, PREFIX_KEY_document.bin and .idx in Megatron's format out.

The flags are those of Megatron's tools/preprocess_data.py. Needs the Hugging Face `tokenizers` package only;
conversations (--input-format conversations, preprocess_conversations.py) and preferences (preprocess_preferences.py)
need `transformers`, images `Pillow`, videos `av` too. """

import array
import json
import os
import struct
import sys
from pathlib import Path

from conversation_forms import FORMS
from preprocess_arguments import parse_arguments
from preprocess_input import (BadRecords, FlagError, InputError, Progress, RecordError, in_workers, input_files,
                              lines_of, model_folder, records_of, whole_text)

DTYPE_CODES = {"H": 8, "i": 4}  # array type codes of uint16 and int32 -> the codes in an .idx file
CHUNK_DOCUMENTS = 64  # documents per task of a worker
CONVERSATION_KEYS = set(FORMS.values())


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
    except Exception as error:  # the package raises plain Exception
        raise InputError(f"{file} is not a tokenizer that the package tokenizers reads: {error}; give the "
                         f"tokenizer.json of a "
                         "Hugging Face model") from None
    # Files contain whole documents, so the limit of a model's input length does not apply.
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


def json_documents(file, keys, bad):
    """A dict key -> list of texts for each line; a text becomes one sequence of the document."""
    for number, item in records_of(file):
        try:
            document = json_document(f"{file}, line {number}", item, keys)
        except RecordError as error:
            bad.add(error)
        else:
            yield document


def json_document(where, item, keys):
    if isinstance(item, RecordError):
        raise item
    if not isinstance(item, dict):
        raise RecordError(f"{where}, is not a JSON object such as {{\"text\": \"...\"}}; correct or delete it")
    document = {}
    for key in keys:
        if key not in item:
            how = "give --input-format conversations" if CONVERSATION_KEYS & item.keys() else "set --json-keys"
            raise RecordError(f"{where}, has no key {key!r} (it has {', '.join(sorted(item)) or 'none'}); {how}")
        texts = item[key] if isinstance(item[key], list) else [item[key]]
        if not all(isinstance(text, str) for text in texts):
            talk = key in CONVERSATION_KEYS
            how = "give --input-format conversations" if talk else "set --json-keys to one that is"
            raise RecordError(f"{where}: the value of {key!r} is no text; {how}")
        for text in texts:
            whole_text(where, text)
        document[key] = texts
    return document


def text_documents(file, key, lines_per_document):
    """Paragraphs, or blocks of this many lines that are not blank."""
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


def documents_of(arguments, files, bad):
    for file in files:
        if arguments.input_format == "jsonl":
            yield from json_documents(file, arguments.json_keys, bad)
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
    progress, bad = Progress(arguments.log_interval), BadRecords(arguments.skip_bad_records)
    try:
        for key in keys:
            writers[key] = Writer(f"{arguments.output_prefix}_{key}_document", type_code)
        chunks = chunks_of(documents_of(arguments, files, bad))
        for encoded, documents in in_workers(arguments.workers, Encoder, (file, type_code, eod), chunks):
            for key, (data, lengths) in encoded.items():
                writers[key].add(data, lengths)
            progress.add(documents, sum(writer.tokens for writer in writers.values()))
        for key, writer in writers.items():
            if writer.tokens == 0:
                bad.tell()
                raise InputError(f"the input holds no text at all for {key!r}; check --input")
        for writer in writers.values():
            writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    finally:
        progress.end()
    bad.tell()
    for key, writer in writers.items():
        print(f"wrote {writer.prefix}.bin and .idx: {progress.documents} documents, {writer.tokens} "
              f"tokens, vocabulary of {vocab_size}; train with --data-path {writer.prefix}")


def main():
    try:
        arguments = parse_arguments()
        if arguments.input_format == "conversations":
            import preprocess_conversations
            preprocess_conversations.preprocess(arguments)
        elif arguments.input_format == "preferences":
            import preprocess_preferences
            preprocess_preferences.preprocess(arguments)
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
