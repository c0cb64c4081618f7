"""Conversations, with images and videos or without, to PREFIX.vision.safetensors, which the runtime maps
(framework/data/conversation_dataset.h).

The input has one JSON object a line, or an array of objects, as transformers' chat templates take them
(conversation_forms.py has the other forms):
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}]}
Images go through the model's own image processor (its Pillow form, resized as torchvision does it), videos
({"type": "video", "video": "cat.mp4"}) through preprocess_videos.py, text through its chat template and tokenizer. A
placeholder becomes one token for each merge_size^2 patches, as in the model's processor. Only what the assistant says
is learnt: what the chat template has between {% generation %} and {% endgeneration %}, else from behind the generation
prompt to the mark that ends the turn. With --template, turn_templates.py reads and tokenises the records instead.

The file's metadata say of what it was made, and by which flags, so that a run can tell whether they are those that its
configuration asks for.
"""

import itertools
import math
import os
import re
from pathlib import Path

from conversation_forms import form_of, messages_in
from conversation_writer import Pictures, Sample, Writer
from preprocess_input import (FlagError, InputError, Progress, in_workers, input_files, model_folder, records_of,
                              whole_text)
from turn_templates import Turns

ROLES = ("system", "user", "assistant", "tool")


def load_tokenizer(model, needs_template=True):
    if not model_folder("--tokenizer-model", str(model)).is_dir():
        raise FlagError(f"--tokenizer-model {model} is no model directory; conversations need its chat template")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError("conversations need the package transformers; install it, or run this with the Python of the "
                         "venv that "
                         "launch/setup made") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{model} has no tokenizer that transformers reads: {error}") from None
    if needs_template and not tokenizer.chat_template:
        raise InputError(f"{model} has no chat template; put its chat_template.jinja or tokenizer_config.json there")
    if needs_template and not tokenizer.is_fast:
        raise InputError(f"{model} has no tokenizer.json, which tells where in the text a token begins; put it there")
    return tokenizer


def load_image_processor(model):
    if not any((Path(model) / f"{name}_config.json").exists() for name in ("preprocessor", "processor")):
        raise InputError(f"{model} has no image processor (preprocessor_config.json); images need the directory of a "
                         f"vision-language "
                         "model")
    try:
        from transformers import AutoImageProcessor
        images = AutoImageProcessor.from_pretrained(model, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{model} has no image processor that transformers reads with the package Pillow: {error}") from None
    if not hasattr(images, "merge_size"):
        raise InputError(f"the image processor of {model} is not that of a Qwen-VL model")
    return images


class Encoder:
    """Makes samples of lines; each worker process has one."""

    def __init__(self, flags, form="messages"):
        self.model, self.sampling = flags.tokenizer_model, (flags.video_fps, flags.video_num_frames)
        self.flags, self.mask_history, self.form = flags, flags.mask_history, form
        self.turns = Turns(flags) if flags.template else None
        self.tokenizer = load_tokenizer(self.model, needs_template=not flags.template)
        self.images, self.videos = None, None  # their processors, until there is one
        marks = {kind: getattr(self.tokenizer, f"{kind}_token", None) or f"<|{kind}_pad|>"
                 for kind in ("image", "video")}
        self.placeholders = {kind: mark for kind, mark in marks.items()
                             if self.tokenizer.convert_tokens_to_ids(mark) not in (None, self.tokenizer.unk_token_id)}

    def need_placeholder(self, kind):
        if kind not in self.placeholders:
            raise InputError(f"the tokenizer of {self.model} has no <|{kind}_pad|>; give the directory of a "
                             f"vision-language model")

    def encode(self, job):
        where, item, folder = job
        if self.turns:
            return self.encode_turns(where, item, folder)
        messages, tools = self.messages_of(where, item)
        parts = [part for message in messages if isinstance(message.get("content"), list)
                 for part in message["content"]]
        images = self.see_images(where, [self.open_image(where, folder, part) for part in parts
                                         if part["type"] == "image"])
        watched = [self.watch(where, folder, part) for part in parts if part["type"] == "video"]
        videos = Pictures()
        if watched:
            videos = Pictures([video.grid for video in watched], b"".join(video.pixels.astype("<f4").tobytes()
                                                                          for video in watched),
                              watched[0].pixels.shape[1])
        texts = {"image": [self.placeholders["image"] * (math.prod(grid) // self.images.merge_size**2)
                           for grid in images.grids],
                 "video": [self.text_of(video) for video in watched]}
        tokens, mask = self.tokenise(where, messages, tools, texts)
        return Sample(tokens, mask, images, videos, [video.seconds_per_grid for video in watched])

    def encode_turns(self, where, item, folder):
        system, texts, paths = self.turns.read(where, item)
        if paths:
            self.need_images(where)
        images = self.see_images(where, [self.turns.open_image(where, folder, path) for path in paths])
        places = [f"<|vision_start|>{self.placeholders['image'] * (math.prod(grid) // self.images.merge_size**2)}"
                  "<|vision_end|>" for grid in images.grids]
        return Sample(*self.turns.tokenise(where, self.tokenizer, system, texts, places), images)

    def see_images(self, where, images):
        if not images:
            return Pictures()
        from preprocess_images import resize
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        of = self.images
        try:
            if of.do_resize:
                images = [resize(image, *smart_resize(image.height, image.width, of.patch_size * of.merge_size,
                                                      of.size.shortest_edge, of.size.longest_edge), of.resample)
                          for image in images]
            seen = of(images=images, do_resize=False, return_tensors="np")
        except ValueError as error:
            raise InputError(f"{where}: the image processor refuses a picture: {error}; give another form of it, or "
                             f"delete the "
                             "line") from None
        return Pictures(seen["image_grid_thw"].tolist(), seen["pixel_values"].astype("<f4").tobytes(),
                        seen["pixel_values"].shape[1])

    def watch(self, where, folder, part):
        from preprocess_videos import VideoProcessor
        try:
            if self.videos is None:
                self.need_placeholder("video")
                self.videos = VideoProcessor(self.model, *self.sampling)
            return self.videos.process(os.path.join(folder, part["video"]), part.get("sample_fps"))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def text_of(self, video):
        count = math.prod(video.grid) // self.videos.parameters["merge_size"]**2
        if not self.videos.says_times:
            return self.placeholders["video"] * count
        start, end = (getattr(self.tokenizer, f"vision_{at}_token", None) or f"<|vision_{at}|>"
                      for at in ("start", "end"))
        step = start + self.placeholders["video"] * (count // video.grid[0]) + end
        return "".join(f"<{time:.1f} seconds>{step}" for time in video.times)

    def messages_of(self, where, item):
        messages, tools = messages_in(where, item, self.form)
        if not isinstance(messages, list) or not messages:
            raise InputError(f"{where} has no list \"messages\"; each line is {{\"messages\": [{{\"role\": ..., "
                             f"\"content\": ...}}]}}")
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in ROLES:
                raise InputError(f"{where}: a message must have a role of {', '.join(ROLES)}")
            content = message.get("content")
            if content is None and message.get("tool_calls"):
                continue
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            for part in parts:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind not in ("text", "image", "video"):
                    raise InputError(f"{where}: content of type {kind!r} is not supported; known are text, image and "
                                     f"video")
                if not isinstance(part.get(kind), str):
                    raise InputError(f"{where}: content of type {kind} needs a string {kind!r}")
                whole_text(where, part[kind])
                for what, mark in self.placeholders.items():
                    if kind == "text" and mark in part["text"]:
                        raise InputError(f"{where}: the text contains {mark}; say {{\"type\": \"{what}\", \"{what}\": "
                                         f"PATH}} instead")
        if messages[0]["role"] == "assistant" or messages[-1]["role"] != "assistant":
            raise InputError(f"{where} must begin with a question and end with an answer of the assistant; complete "
                             f"or delete it")
        return [self.joined(message) for message in messages], tools

    @staticmethod
    def joined(message):
        """Parts of text alone as one string: the templates of text models know no parts."""
        content = message.get("content")
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            return {**message, "content": "".join(part["text"] for part in content)}
        return message

    def need_images(self, where):
        if self.images is None:
            try:
                self.need_placeholder("image")
                self.images = load_image_processor(self.model)
                if not self.turns:
                    self.set_limits()
            except InputError as error:
                raise InputError(f"{where}: {error}") from None

    def set_limits(self):
        """Of pixels, where flags have others than the processor."""
        size, flags = self.images.size, self.flags
        least = size.shortest_edge if flags.image_min_pixels is None else flags.image_min_pixels
        most = size.longest_edge if flags.image_max_pixels is None else flags.image_max_pixels
        self.images.size = type(size)(shortest_edge=least, longest_edge=most)

    def open_image(self, where, folder, part):
        self.need_images(where)
        from preprocess_images import read_image
        path = os.path.join(folder, part["image"])
        try:
            return read_image(path)
        except Exception as error:  # Pillow's decoders raise many kinds for a damaged file
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{where}: cannot read the image {path}: {reason}; correct the path or the file, or "
                             f"delete the "
                             "line") from None

    def render(self, where, messages, tools, generate=False, **more):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate,
                                                      **more or {"tokenize": False})
        except Exception as error:  # templates raise what they like
            raise InputError(
                f"{where}: the chat template refuses the messages: {error}; correct or delete the line") from None

    def learnt(self, where, messages, tools):
        """The text of the conversation, and for each character whether it is learnt."""
        text = self.render(where, messages, tools)
        learnt = bytearray(len(text))
        tagged = re.search(r"{%-?\s*generation\s*-?%}", self.tokenizer.get_chat_template(tools=tools))
        if tagged:
            marked = self.render(where, messages, tools, return_assistant_tokens_mask=True,
                                 tokenizer_kwargs={"return_offsets_mapping": True})
            for (start, end), is_answer in zip(marked["offset_mapping"], marked["assistant_masks"]):
                learnt[start:end] = bytes([is_answer]) * (end - start)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.mask_history:
            answers = answers[-1:]
        elif tagged:
            answers = []
        for i in answers:
            before, upto = self.render(where, messages[:i], tools, True), self.render(where, messages[:i + 1], tools)
            if not text.startswith(upto):
                raise InputError(f"{where}: the chat template writes an earlier answer in another way when later "
                                 f"turns come, so it "
                                 "is not what the model would have said; give each answer to learn a line that ends "
                                 "with it, and "
                                 "--mask-history, or mark what is learnt in the template by {% generation %}")
            if not upto.startswith(before):
                raise InputError(f"{where}: an answer does not begin with the chat template's generation prompt; give "
                                 f"it as the "
                                 "template expects it, with its reasoning for example, or correct the template")
            if tagged:
                learnt[:len(before)] = bytes(len(before))
            else:
                end = len(upto.rstrip())
                learnt[len(before):end] = b"\1" * (end - len(before))
        return text, learnt

    def tokenise(self, where, messages, tools, texts):
        """Tokens and loss mask; `texts` are what the places of each kind become, in their order."""
        text, learnt = self.learnt(where, messages, tools)
        for kind, mark in self.placeholders.items():
            if text.count(mark) != len(texts[kind]):
                raise InputError(f"{where}: the chat template makes {text.count(mark)} places for {len(texts[kind])} "
                                 f"{kind}s; use "
                                 "the model's own")
        expanded, mask, done = "", bytearray(), 0
        for place in re.finditer("|".join(map(re.escape, self.placeholders.values())) or "$^", text):
            instead = texts["image" if place.group() == self.placeholders.get("image") else "video"].pop(0)
            expanded += text[done:place.start()] + instead
            mask += learnt[done:place.start()] + learnt[place.start():place.start() + 1] * len(instead)
            done = place.end()
        expanded += text[done:]
        mask += learnt[done:]
        encoded = self.tokenizer(expanded, return_offsets_mapping=True, add_special_tokens=False)
        return encoded["input_ids"], bytes(mask[first] for first, _ in encoded["offset_mapping"])


def jobs_of(arguments):
    for file in input_files(arguments.input):
        folder = arguments.image_folder or os.path.dirname(file)
        for number, item in records_of(file):
            yield f"{file}, line {number},", item, folder


# What a set's tokens and pixels follow from, besides the files themselves.
RECORDED = ("conversation_form", "template", "columns", "cutoff_length", "image_max_pixels", "image_min_pixels",
            "video_fps", "video_num_frames", "max_length", "max_samples", "mask_history", "learn_questions",
            "strip_text")


def recorded_flags(arguments):
    """{"--cutoff-length": "1024", ...}: what was given, lists by blanks; switches have no words."""
    flags = {}
    for name in RECORDED:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            words = value if isinstance(value, list) else [] if value is True else [value]
            flags["--" + name.replace("_", "-")] = " ".join(map(str, words))
    return flags


def preprocess(arguments):
    jobs = jobs_of(arguments)
    first = next(jobs, None)
    if first is None:
        raise InputError("the input holds no conversation; check --input")
    form = None if arguments.template else arguments.conversation_form or form_of(*first[:2])
    jobs = itertools.islice(itertools.chain([first], jobs), arguments.max_samples)
    encoder = (arguments, form)
    if arguments.workers > 1:
        Encoder(*encoder)  # its errors here, not in a worker
    writer = Writer(arguments.output_prefix, recorded_flags(arguments), input_files(arguments.input))
    progress, left_out = Progress(arguments.log_interval), 0
    try:
        for sample in in_workers(arguments.workers, Encoder, encoder, jobs):
            if arguments.max_length is not None and len(sample.tokens) > arguments.max_length:
                left_out += 1
                continue
            writer.add(sample)
            progress.add(1, len(writer.tokens))
        if not writer.sample_ends:
            raise InputError("the input holds no conversation (of at most --max-length tokens); check --input")
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    finally:
        progress.end()
    print(f"wrote {writer.path}: {progress.documents} conversations ({left_out} longer ones left out), "
          f"{len(writer.tokens)} tokens, "
          f"{sum(writer.mask)} of them to learn, {writer.images.count} images, {writer.videos.count} videos; train "
          f"with "
          f"--data-path {arguments.output_prefix}")
