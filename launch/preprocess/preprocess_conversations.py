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

import collections
import itertools
import os
import re

import transcriptions
from chat_text import ChatText
from conversation_forms import UNREAD, Completion, form_of, read
from conversation_pictures import PictureReader
from conversation_sounds import SoundReader, sound_paths
from conversation_writer import Sample, Writer
from preprocess_input import (BadRecords, FlagError, InputError, Progress, RecordError, counted, in_workers,
                              input_files, model_folder, notice, records_of, whole_text)
from turn_templates import Turns

NOTHING = "nothing is learnt of"
MOST_TOLD = 20  # kinds reported per line
PART_KEYS = {"text": ("type", "text"), "image": ("type", "image"), "video": ("type", "video", "sample_fps"),
             "audio": ("type", "audio")}


def load_tokenizer(model, needs_template=True, fix_mistral_regex=None):
    if not model_folder("--tokenizer-model", str(model)).is_dir():
        raise FlagError(f"--tokenizer-model {model} is no model directory; conversations need its chat template")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError("conversations need the package transformers; install it, or run this with the Python of the "
                         "venv that "
                         "launch/setup made") from None
    try:
        fix = {"fix_mistral_regex": True} if fix_mistral_regex else {}
        tokenizer = AutoTokenizer.from_pretrained(model, **fix)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{model} has no tokenizer that transformers reads: {error}") from None
    if needs_template:
        require_template(model, tokenizer)
    if needs_template and not tokenizer.is_fast:
        raise InputError(f"{model} has no tokenizer.json, which tells where in the text a token begins; put it there")
    return tokenizer


def require_template(model, tokenizer):
    if not tokenizer.chat_template:
        raise InputError(f"{model} has no chat template; put its chat_template.jinja or tokenizer_config.json there")


def common_length(one, other):
    """Number of tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


class Encoder:
    """Makes samples of lines; each worker process has one."""

    def __init__(self, flags, form="messages"):
        self.model, self.flags, self.form = flags.tokenizer_model, flags, form
        self.turns = Turns(flags) if flags.template else None
        self.tokenizer = load_tokenizer(self.model, not flags.template and form != "completion",
                                        flags.fix_mistral_regex)
        self.chat = ChatText(self.tokenizer, flags.mask_history, flags.training_form)
        self.pictures = PictureReader(flags, self.tokenizer)
        self.sounds = SoundReader(self.model, self.tokenizer)
        self.placeholders = self.pictures.placeholders | ({"audio": self.sounds.mark} if self.sounds.mark else {})

    def encode(self, job):
        """What a record becomes or, with --skip-bad-records, its error."""
        where, item, folder = job
        try:
            if isinstance(item, RecordError):
                raise item
            whole_text(where, item)
            return self.encode_item(where, item, folder)
        except RecordError as error:
            if not self.flags.skip_bad_records:
                raise
            return error

    def encode_item(self, where, item, folder):
        encode = self.encode_turns if self.turns else self.encode_record
        sample = encode(where, item, folder)
        return sample if any(sample.mask) else sample._replace(told=[*sample.told, (NOTHING, "", "conversation")])

    def encode_record(self, where, item, folder):
        knows_developer = "developer" in str(self.tokenizer.chat_template)
        conversation = read(where, item, self.form, knows_developer)
        if isinstance(conversation, Completion):
            return self.encode_completion(where, conversation)
        conversation = self.checked(where, conversation)
        (images, videos, seconds, sounds), places = self.items_of(where, conversation, folder)
        tokens, mask, told = self.tokenise(where, conversation, places)
        return Sample(tokens, mask, images, videos, seconds, [*conversation.told, *told], sounds)

    def items_of(self, where, conversation, folder):
        """(images, videos, seconds per step of these, sounds), and by kind their placeholder texts."""
        parts = [part for message in conversation.messages if isinstance(message.get("content"), list)
                 for part in message["content"]]
        paths = [os.path.join(folder, part["image"]) for part in parts if part["type"] == "image"]
        images, places = self.pictures.images(where, [self.pictures.open_image(where, path) for path in paths])
        videos, seconds, video_places = self.pictures.videos(
            where, folder, [part for part in parts if part["type"] == "video"])
        sounds, sound_places = self.sounds.sounds(where, sound_paths(folder, parts))
        return (images, videos, seconds, sounds), {"image": places, "video": video_places, "audio": sound_places}

    def encode_completion(self, where, texts):
        prompt, tokens = self.tokens_of_completion(texts)
        same = common_length(prompt, tokens)
        return Sample(tokens, bytes(same) + b"\1" * (len(tokens) - same), told=texts.told)

    def tokens_of_completion(self, texts):
        """Of the prompt, and of it and its completion, as TRL makes them: no chat template, the end token last."""
        end = self.tokenizer.eos_token
        if not end:
            raise InputError(f"the tokenizer of {self.model} names no eos_token, which ends a completion; name one in "
                             "its tokenizer_config.json")
        text = texts.text if texts.text.endswith(end) else texts.text + end
        return [self.tokenizer(each)["input_ids"] for each in (texts.prompt, texts.prompt + text)]

    def encode_turns(self, where, item, folder):
        if self.turns.template.transcribes:
            return transcriptions.encode(where, self.tokenizer, self.sounds, item, folder, self.turns.columns)
        system, texts, learnt, paths, clips, told = self.turns.read(where, item)
        images, places = self.pictures.images(where, [self.turns.open_image(where, folder, path) for path in paths])
        sounds, sound_places = self.sounds.sounds(where, [self.turns.open_sound(folder, path) for path in clips])
        tokens, mask = self.turns.tokenise(where, self.tokenizer, system, texts, learnt, places, sound_places)
        return Sample(tokens, mask, images, told=told, sounds=sounds)

    def checked(self, where, conversation):
        """With contents that are known here; parts of text alone become one."""
        told = []
        for message in conversation.messages:
            content = message.get("content")
            if content is None and message.get("tool_calls"):
                continue
            if content is None or content == []:
                raise RecordError(f"{where}: a message of the {message['role']} has no content; complete or delete the "
                                  "record")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            for part in parts:
                kind = part.get("type") if isinstance(part, dict) else None
                if not isinstance(kind, str) or kind not in PART_KEYS:
                    raise RecordError(f"{where}: content of type {kind!r} is not supported; known are text, image, "
                                      "video and audio")
                if not isinstance(part.get(kind), str):
                    raise RecordError(f"{where}: content of type {kind} needs a string {kind!r}")
                told += [(UNREAD, repr(key), f"part of {kind}") for key, value in part.items()
                         if key not in PART_KEYS[kind] and value is not None]
                for what, mark in self.placeholders.items():
                    if kind == "text" and mark in part["text"]:
                        raise RecordError(f"{where}: the text contains {mark}; say {{\"type\": \"{what}\", \"{what}\": "
                                          f"PATH}} instead")
        return conversation._replace(messages=[self.joined(message) for message in conversation.messages],
                                     told=[*conversation.told, *told])

    @staticmethod
    def joined(message):
        """Parts of text alone as one string: the templates of text models know no parts."""
        content = message.get("content")
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            return {**message, "content": "".join(part["text"] for part in content)}
        return message

    def tokenise(self, where, conversation, texts):
        """Tokens, loss mask and notices; `texts`: the placeholder texts of each kind, in order."""
        text, learnt, told = self.chat.of(where, conversation)
        expanded, mask = self.expanded(where, text, learnt, texts)
        encoded = self.tokenizer(expanded, return_offsets_mapping=True, add_special_tokens=False)
        return encoded["input_ids"], bytes(mask[first] for first, _ in encoded["offset_mapping"]), told

    def expanded(self, where, text, learnt, texts):
        """With `texts` in their places, and which of the characters are learnt."""
        for kind, mark in self.placeholders.items():
            if text.count(mark) != len(texts[kind]):
                raise RecordError(f"{where}: the chat template makes {text.count(mark)} places for {len(texts[kind])} "
                                  f"{kind}s; use the model's own")
        texts = {mark: iter(texts[kind]) for kind, mark in self.placeholders.items()}
        expanded, mask, done = "", bytearray(), 0
        for place in re.finditer("|".join(map(re.escape, texts)) or "$^", text):
            instead = next(texts[place.group()])
            expanded += text[done:place.start()] + instead
            mask += learnt[done:place.start()] + learnt[place.start():place.start() + 1] * len(instead)
            done = place.end()
        return expanded + text[done:], mask + learnt[done:]


def jobs_of(arguments):
    for file in input_files(arguments.input):
        folder = arguments.image_folder or os.path.dirname(file)
        for number, item in records_of(file):
            yield f"{file}, line {number}", item, folder


def form_and_jobs(arguments, jobs, form_of_record):
    """The form of the first record that has one, and all jobs again."""
    seen = []
    for job in jobs:
        seen.append(job)
        try:
            form = form_of_record(*job[:2])
        except RecordError:
            if not arguments.skip_bad_records:
                raise
        else:
            return form, itertools.islice(itertools.chain(seen, jobs), arguments.max_samples)
    raise nothing_found(arguments)


def nothing_found(arguments):
    return InputError(f"the input holds no {arguments.input_format.removesuffix('s')}" +
                      (" (of at most --max-length tokens)" if arguments.max_length else "") + "; check --input")


# Flags that determine a set's tokens and pixels (--skip-bad-records does not change them).
RECORDED = ("conversation_form", "template", "columns", "cutoff_length", "image_max_pixels", "image_min_pixels",
            "video_fps", "video_num_frames", "max_length", "max_samples", "mask_history", "training_form",
            "learn_questions", "strip_text", "kto_batch_size", "fix_mistral_regex", "disable_thinking")


def recorded_flags(arguments):
    """{"--cutoff-length": "1024", ...}: the given flags; lists are joined by blanks, switches have no value."""
    flags = {}
    for name in RECORDED:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            words = value if isinstance(value, list) else [] if value is True else [value]
            flags["--" + name.replace("_", "-")] = " ".join(map(str, words))
    return flags


def tell(told):
    """Prints one line per kind of notice, with its counts."""
    lines = {}
    for (how, what, of), count in told.items():
        lines.setdefault(how, []).append((f"{what} of " if what else "") + counted(count, of))
    for how, met in lines.items():
        more = f" and {counted(len(met) - MOST_TOLD, 'more kind')}" if len(met) > MOST_TOLD else ""
        notice(f"{how}: {', '.join(met[:MOST_TOLD])}{more}")


def preprocess(arguments):
    def form_of_record(where, item):
        return None if arguments.template else arguments.conversation_form or form_of(where, item)

    form, jobs = form_and_jobs(arguments, jobs_of(arguments), form_of_record)
    samples = encoded(arguments, Encoder, (arguments, form), jobs)
    write_set(arguments, (sample if isinstance(sample, RecordError) else [sample] if fits(arguments, sample) else None
                          for sample in samples), "conversation")


def encoded(arguments, encoder, given, jobs):
    if arguments.workers > 1:
        encoder(*given)  # raises its errors here instead of in a worker
    return in_workers(arguments.workers, encoder, given, jobs)


def fits(arguments, sample):
    return arguments.max_length is None or len(sample.tokens) <= arguments.max_length


def write_set(arguments, records, what):
    """`records`: of each record its samples, or its error, or None if it is too long; `what` is a record called?"""
    bad, told = BadRecords(arguments.skip_bad_records), collections.Counter()
    writer = Writer(arguments.output_prefix, recorded_flags(arguments), input_files(arguments.input))
    progress, left_out = Progress(arguments.log_interval), 0
    try:
        for samples in records:
            if isinstance(samples, RecordError):
                bad.add(samples)
                continue
            if samples is None:
                left_out += 1
                continue
            for sample in samples:
                writer.add(sample)
                told.update(sample.told)
            progress.add(1, len(writer.tokens))
        if not writer.sample_ends:
            bad.tell()
            raise nothing_found(arguments)
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    finally:
        progress.end()
    bad.tell()
    tell(told)
    print(f"wrote {writer.path}: {counted(progress.documents, what)} ({left_out} longer ones left out), "
          f"{counted(len(writer.tokens), 'token')}, {sum(writer.mask)} of them to learn, "
          f"{counted(writer.images.count, 'image')}, {counted(writer.videos.count, 'video')}; train with --data-path "
          f"{arguments.output_prefix}")
