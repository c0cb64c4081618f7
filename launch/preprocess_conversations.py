"""Conversations with pictures to PREFIX.vision.safetensors, which the runtime maps (framework/data/picture_dataset.h).

One JSON object a line, as transformers' chat templates take them:
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}]}
Images go through the model's own image processor (its Pillow form), text through its chat template and tokenizer; a
placeholder becomes one token for each merge_size^2 patches, as the model's processor does it. Only what the assistant
says is learnt, from behind the generation prompt to the mark that ends the turn.
"""

import array
import json
import multiprocessing
import os
import shutil
import struct
from pathlib import Path

from preprocess_input import InputError, Progress, input_files, lines_of

ROLES = ("system", "user", "assistant", "tool")


def load_processors(model):
    if not Path(model).is_dir():
        raise InputError(f"--tokenizer-model {model} is no model directory; conversations need its chat template and image processor")
    try:
        from transformers import AutoImageProcessor, AutoTokenizer
    except ImportError:
        raise InputError("conversations need the packages transformers and Pillow; install them, or run this with the Python of "
                         "the venv that launch/setup made") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        images = AutoImageProcessor.from_pretrained(model, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{model} has no tokenizer and image processor that transformers reads: {error}") from None
    if not tokenizer.chat_template:
        raise InputError(f"{model} has no chat template; put its chat_template.jinja or tokenizer_config.json there")
    if not tokenizer.is_fast or not hasattr(images, "merge_size"):
        raise InputError(f"the processors of {model} are not those of a Qwen-VL model")
    return tokenizer, images


class Encoder:
    """Makes samples of lines; each worker process has one."""

    current = None

    def __init__(self, model):
        self.tokenizer, self.images = load_processors(model)
        self.placeholder = getattr(self.tokenizer, "image_token", None) or "<|image_pad|>"
        if self.tokenizer.convert_tokens_to_ids(self.placeholder) in (None, self.tokenizer.unk_token_id):
            raise InputError(f"the tokenizer of {model} has no {self.placeholder}; give the model's own directory")

    def encode(self, job):
        """tokens, loss mask, grids, pixels as bytes, width of a patch."""
        where, line, folder = job
        messages = self.messages_of(where, line)
        pictures = [self.open_image(where, folder, part) for message in messages if isinstance(message["content"], list)
                    for part in message["content"] if part["type"] == "image"]
        grids, pixels, width = [], b"", 0
        if pictures:
            try:
                seen = self.images(images=pictures, return_tensors="np")
            except ValueError as error:
                raise InputError(f"{where}: the image processor refuses a picture: {error}; give another form of it, or delete the "
                                 "line") from None
            grids = seen["image_grid_thw"].tolist()
            width = seen["pixel_values"].shape[1]
            pixels = seen["pixel_values"].astype("<f4").tobytes()
        tokens, mask = self.tokenise(where, messages, grids)
        return tokens, mask, grids, pixels, width

    def messages_of(self, where, line):
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where} is not JSON ({error}); correct or delete it") from None
        messages = item.get("messages") if isinstance(item, dict) else None
        if not isinstance(messages, list) or not messages:
            raise InputError(f"{where} has no list \"messages\"; each line is {{\"messages\": [{{\"role\": ..., \"content\": ...}}]}}")
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in ROLES:
                raise InputError(f"{where}: a message must have a role of {', '.join(ROLES)}")
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            for part in parts:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind not in ("text", "image"):
                    raise InputError(f"{where}: content of type {kind!r} is not supported; known are text and image")
                if not isinstance(part.get(kind), str):
                    raise InputError(f"{where}: content of type {kind} needs a string {kind!r}")
                if kind == "text" and self.placeholder in part["text"]:
                    raise InputError(f"{where}: the text contains {self.placeholder}; say {{\"type\": \"image\", \"image\": PATH}} instead")
        if messages[0]["role"] == "assistant" or messages[-1]["role"] != "assistant":
            raise InputError(f"{where} must begin with a question and end with an answer of the assistant; complete or delete it")
        return messages

    def open_image(self, where, folder, part):
        from PIL import Image
        path = os.path.join(folder, part["image"])
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except Exception as error:  # Pillow's decoders raise many kinds for a damaged file
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{where}: cannot read the image {path}: {reason}; correct the path or the file, or delete the "
                             "line") from None

    def render(self, messages, generate=False):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)

    def tokenise(self, where, messages, grids):
        text = self.render(messages)
        answers = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, upto = self.render(messages[:i], True), self.render(messages[:i + 1])
            if not text.startswith(upto) or not upto.startswith(before):
                raise InputError(f"{where}: the chat template changes earlier turns when later ones come, so answers cannot be "
                                 "told apart; give one answer a line")
            answers.append((len(before), len(upto.rstrip())))
        pieces = text.split(self.placeholder)
        if len(pieces) != len(grids) + 1:
            raise InputError(f"{where}: the chat template makes {len(pieces) - 1} places for {len(grids)} images; use the model's own")
        expanded, shifts = pieces[0], []
        for (frames, rows, columns), piece in zip(grids, pieces[1:]):
            count = frames * rows * columns // self.images.merge_size**2
            shifts.append((len(expanded), (count - 1) * len(self.placeholder)))
            expanded += self.placeholder * count + piece
        for at, shift in shifts:  # in the order of the text, so every place is in the expanded text already
            answers = [tuple(place + shift if place > at else place for place in answer) for answer in answers]
        encoded = self.tokenizer(expanded, return_offsets_mapping=True, add_special_tokens=False)
        mask = bytes(any(start <= first < end for start, end in answers) for first, _ in encoded["offset_mapping"])
        return encoded["input_ids"], mask

    @classmethod
    def start_worker(cls, *arguments):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cls.current = cls(*arguments)

    @classmethod
    def encode_in_worker(cls, job):
        return cls.current.encode(job)


class Writer:
    """The set; it gets its name in finish(), so that half a set never looks whole."""

    def __init__(self, prefix):
        self.path = prefix + ".vision.safetensors"
        self.tokens, self.mask, self.grids = array.array("i"), bytearray(), array.array("q")
        self.sample_ends, self.image_ends = array.array("q"), array.array("q")
        self.patches, self.width = 0, 0
        self.pixels = open(self.path + ".pixels.partial", "w+b")

    def add(self, tokens, mask, grids, pixels, width):
        self.tokens.extend(tokens)
        self.mask += mask
        for grid in grids:
            self.grids.extend(grid)
        self.sample_ends.append(len(self.tokens))
        self.image_ends.append(len(self.grids) // 3)
        if grids:
            self.width = width
            self.patches += len(pixels) // (4 * width)
            self.pixels.write(pixels)

    def finish(self):
        arrays = [("sample_ends", "I64", [len(self.sample_ends)], self.sample_ends.tobytes()),
                  ("image_ends", "I64", [len(self.image_ends)], self.image_ends.tobytes()),
                  ("image_grid_thw", "I64", [len(self.grids) // 3, 3], self.grids.tobytes()),
                  ("pixel_values", "F32", [self.patches, self.width], None),
                  ("tokens", "I32", [len(self.tokens)], self.tokens.tobytes()),
                  ("loss_mask", "U8", [len(self.mask)], bytes(self.mask))]
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name, dtype, shape, data in arrays:
            size = 4 * self.patches * self.width if data is None else len(data)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path + ".partial", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, _, _, data in arrays:
                if data is None:
                    self.pixels.seek(0)
                    shutil.copyfileobj(self.pixels, file, 1 << 20)
                else:
                    file.write(data)
        os.replace(self.path + ".partial", self.path)
        self.discard()

    def discard(self):
        self.pixels.close()
        for suffix in (".partial", ".pixels.partial"):
            if os.path.exists(self.path + suffix):
                os.remove(self.path + suffix)


def jobs_of(arguments):
    for file in input_files(arguments.input):
        folder = arguments.image_folder or os.path.dirname(file)
        for number, line in lines_of(file):
            if line.strip():
                yield f"{file}, line {number},", line, folder


def encode_all(arguments, jobs):
    if arguments.workers == 1:
        yield from map(Encoder(arguments.tokenizer_model).encode, jobs)
        return
    with multiprocessing.Pool(arguments.workers, Encoder.start_worker, (arguments.tokenizer_model,)) as pool:
        yield from pool.imap(Encoder.encode_in_worker, jobs)


def preprocess(arguments):
    folder = os.path.dirname(arguments.output_prefix) or "."
    if not os.path.isdir(folder):
        raise InputError(f"the folder {folder} of --output-prefix does not exist; create it first")
    load_processors(arguments.tokenizer_model)  # its errors here, not in a worker
    writer, progress, left_out = Writer(arguments.output_prefix), Progress(arguments.log_interval), 0
    try:
        for sample in encode_all(arguments, jobs_of(arguments)):
            if arguments.max_length is not None and len(sample[0]) > arguments.max_length:
                left_out += 1
                continue
            writer.add(*sample)
            progress.add(1, len(writer.tokens))
        if not writer.sample_ends:
            raise InputError("the input holds no conversation (of at most --max-length tokens); check --input")
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    finally:
        progress.end()
    print(f"wrote {writer.path}: {progress.documents} conversations ({left_out} longer ones left out), {len(writer.tokens)} tokens, "
          f"{sum(writer.mask)} of them to learn, {len(writer.grids) // 3} images; train with --data-path {arguments.output_prefix}")
