"""Conversations tokenised turn by turn (--template), as LLaMA-Factory does it, and MindSpeed-MM in its configurations.

A record has its turns in one column, pairs of a question and an answer, and its pictures and clips of sound in others;
<image> and <audio> stand in the text for each of them, in their order. Each turn is tokenised by itself. An answer is
learnt with what ends it. What is longer than --cutoff-length is cut, pair by pair.
"""

import math
import os
import re
from typing import NamedTuple

from conversation_forms import PICTURES, PREFERENCES, SYSTEM_TURN, UNREAD, preference
from learnt_turns import MARKS, is_learnt
from preprocess_input import InputError, RecordError

PLACE, SOUND_PLACE = "<image>", "<audio>"
NO_END = "the end token is not learnt behind answers other than the last"
LEAST_SIDE, LONGEST, CUT_TO = 28, 200, 180  # pixels of a side; sides of an image that are stretched, and to what


class Template(NamedTuple):
    system: str  # default for records without one
    resample: int  # Pillow's filter for resizing a picture to its pixel limits
    system_form: str = "<|im_start|>system\n{}<|im_end|>\n"
    question: str = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    answer: str = "{}<|im_end|>\n"
    has_ends: bool = False  # the tokenizer's bos token before all, its eos token behind each answer
    picture: str = "<|vision_start|>{}<|vision_end|>"
    mark: str = "<|image_pad|>"  # of a picture's tokens
    stretches: bool = True  # pictures that are smaller than LEAST_SIDE or longer than LONGEST
    sound: str = "<|audio_start|>{}<|audio_end|>"
    sound_mark: str = "<|audio_pad|>"
    thoughts: tuple = ()  # the words around thoughts, which answers without any get
    transcribes: bool = False  # reads transcriptions.py's records
    prefix: str = ""  # of a conversation
    ends_with_eos: bool = False  # the tokenizer's end token follows the last answer alone
    # Of InternVL's own program: the answer's head is one of its tokens, and the line break behind it is not learnt;
    # what is longer is cut off; one picture needs no mark; pictures are taken as they are, and share the tiles.
    head: str = ""


MAGISTRAL = ("First draft your thinking process (inner monologue) until you arrive at a response. Format your response "
             "using Markdown, and use LaTeX for any mathematical equations. Write both your thoughts and the response "
             "in the same language as the input.\nYour thinking process must follow the template below:[THINK]Your "
             "thoughts or/and draft, like working through an exercise on scratch paper. Be as casual and as long as "
             "you want until you are confident to generate the response. Use the same language as the input.[/THINK]"
             "Here, provide a self-contained response.      ")  # with the blanks of MindSpeed-MM's template
INTERNVL = ("\u4f60\u662f\u4e66\u751f\u00b7\u4e07\u8c61\uff0c\u82f1\u6587\u540d\u662fInternVL\uff0c"
            "\u662f\u7531\u4e0a\u6d77\u4eba\u5de5\u667a\u80fd\u5b9e\u9a8c\u5ba4\u3001\u6e05\u534e\u5927"
            "\u5b66\u53ca\u591a\u5bb6\u5408\u4f5c\u5355\u4f4d\u8054\u5408\u5f00\u53d1\u7684\u591a\u6a21"
            "\u6001\u5927\u8bed\u8a00\u6a21\u578b\u3002")
TEMPLATES = {"qwen2vl": Template("You are a helpful assistant.", 0), "qwen3_vl_nothink": Template("", 3),
             "mistral": Template(MAGISTRAL, 0, "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}", True, "{}",
                                 "[IMG]", False),
             "qwen3_omni": Template("", 3, thoughts=("<think>", "</think>")), "qwen3_omni_nothink": Template("", 3),
             "qwen3_asr": Template("", 3, transcribes=True),
             "glm4v_moe": Template("", 3, "<|system|>\n{}", "<|user|>\n{}<|assistant|>", "\n{}",
                                   picture="<|begin_of_image|>{}<|end_of_image|>", mark="<|image|>",
                                   thoughts=("<think>", "</think>"), prefix="[gMASK]<sop>", ends_with_eos=True),
             "kimi_k25": Template("You are a helpful assistant", 0, "<|im_system|>system<|im_middle|>{}<|im_end|>",
                                  "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|>",
                                  "{}<|im_end|>", picture="<|media_start|>image<|media_content|>{}<|media_end|>",
                                  mark="<|media_pad|>", stretches=False,
                                  thoughts=("\u25c1think\u25b7", "\u25c1/think\u25b7")),
             "step3_vl": Template("", 0, picture="{}", mark="<im_patch>", stretches=False),
             "internvl2_5": Template(INTERNVL, 3, question="<|im_start|>user\n{}<|im_end|>\n",
                                     answer="<|im_start|>assistant\n{}<|im_end|>\n", picture="{}",
                                     mark="<IMG_CONTEXT>", head="<|im_start|>assistant\n")}
COLUMNS = {"messages": "conversations", "images": "", "audios": "", "system": "", "role": "from", "content": "value",
           "user": "human", "assistant": "gpt", "system_role": "system"}  # LLaMA-Factory's defaults


def columns_of(words):
    """{"messages": "conversations", ...} of KEY=NAME words; an empty name: there is no such column."""
    columns = dict(COLUMNS)
    for word in words or ():
        key, equals, name = word.partition("=")
        if not equals or key not in columns:
            raise ValueError(f"{word!r} is not KEY=NAME with a key of {', '.join(columns)}")
        columns[key] = name
    return columns


def shares(question, answer, room):
    """Number of tokens of a pair to keep within a limit."""
    if 2 * answer < room:
        most = room
    elif 2 * question < room:
        most = room - question
    else:
        most = int(room * (answer / (question + answer)))
    answer = min(most, answer)
    return min(max(room - answer, 0), question), answer


def without_thoughts(text, begin, end):
    return re.sub(f"{re.escape(begin)}(.*?){re.escape(end)}", "", text, flags=re.DOTALL).lstrip("\n")


def without_turns(where):
    return RecordError(f"{where}: the turns must be pairs of a question and an answer; correct or delete it")


class Turns:
    """Reads records and tokenises them. `flags` are preprocess_data.py's."""

    def __init__(self, flags):
        self.template = TEMPLATES[flags.template]
        self.columns = columns_of(flags.columns)
        self.flags = flags

    def text_in(self, where, turn):
        text = turn.get(self.columns["content"])
        if not isinstance(text, str):
            raise RecordError(f"{where}: a turn has no text {self.columns['content']!r}; correct or delete it")
        return text.strip() if self.flags.strip_text else text

    def read(self, where, item):
        """(system, texts of question and answer in turn, which are learnt, paths of pictures and of clips, notices)"""
        turns = item.get(self.columns["messages"]) if isinstance(item, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise RecordError(f"{where} has no list {self.columns['messages']!r} of turns; give --columns "
                              "messages=NAME")
        self.refuse_unread(where, item)
        system, role, told = "", self.columns["role"], []
        if self.columns["system_role"] and turns[0].get(role) == self.columns["system_role"]:
            system, turns = self.text_in(where, turns[0]), turns[1:]
            if item.get(self.columns["system"]):
                told.append((SYSTEM_TURN, "", "record"))
        elif self.columns["system"]:
            system = item.get(self.columns["system"]) or ""
            if not isinstance(system, str):
                raise RecordError(f"{where}: {self.columns['system']!r} is no text; correct or delete it")
        for number, turn in enumerate(turns):
            wanted = self.columns["assistant" if number % 2 else "user"]
            if turn.get(role) != wanted:
                raise RecordError(f"{where}: turn {number + 1} has {role} {turn.get(role)!r} instead of {wanted!r}; "
                                  "correct or delete it, or give --columns")
        if not turns or len(turns) % 2:
            raise without_turns(where)
        texts = [self.text_in(where, turn) for turn in turns]
        if self.template.head and isinstance(item.get(self.columns["images"]), str) and PLACE not in texts[0]:
            texts[0] = f"{PLACE}\n{texts[0]}"
        if self.template.ends_with_eos and len(texts) > 2:
            told.append((NO_END, "", "conversation"))
        images = self.paths(where, item, "images", texts, PLACE)
        clips = self.paths(where, item, "audios", texts, SOUND_PLACE)
        return system, texts, self.learnt(where, turns), images, clips, told + self.unread(item, turns)

    def paths(self, where, item, kind, texts, place):
        """Files of that column, one for each of its marks in the texts."""
        found = (item.get(self.columns[kind]) or []) if self.columns[kind] else []
        found = found if isinstance(found, list) else [found]
        if not all(isinstance(path, str) for path in found):
            raise RecordError(f"{where}: {self.columns[kind]!r} is no list of paths; correct or delete it")
        marks = sum(text.count(place) for text in texts)
        if marks != len(found):
            raise RecordError(f"{where}: there are {marks} marks {place} for {len(found)} {kind}; correct or delete it")
        return found

    def refuse_unread(self, where, item):
        """What a record without it would not mean."""
        for key in PREFERENCES:
            if item.get(key) is not None and self.columns["messages"] not in PREFERENCES:
                raise preference(where, key)
        for key in PICTURES:
            if item.get(key) and key not in (self.columns["images"], self.columns["audios"]):
                raise RecordError(f"{where}: its {key!r} are not read; pictures are those of --columns images=NAME, "
                                  "sounds those of audios=NAME")

    def learnt(self, where, turns):
        """Whether each turn is learnt: answers, and with --learn-questions questions; a mark may exclude it."""
        return [is_learnt(where, turn, "assistant" if number % 2 or self.flags.learn_questions else "user")
                for number, turn in enumerate(turns)]

    def unread(self, item, turns):
        read = {self.columns[key] for key in ("messages", "images", "audios", "system")}
        told = [(UNREAD, repr(key), "record") for key, value in item.items()
                if key not in read and value not in (None, "", [], {})]
        of_turns = {self.columns["role"], self.columns["content"], *MARKS}
        return told + [(UNREAD, repr(key), "message") for turn in turns for key, value in turn.items()
                       if key not in of_turns and value not in (None, "", [], {})]

    def open_image(self, where, folder, path):
        """The picture as stored, ignoring EXIF, scaled into the limits of pixels."""
        from PIL import Image

        inside = os.path.join(folder, path)
        try:
            with Image.open(inside if os.path.isfile(inside) else path) as file:
                image = self.limited(file)
        except Exception as error:  # Pillow's decoders raise many kinds for a damaged file
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{where}: cannot read the image {path}: {reason}; correct the path, the file or "
                             "--image-folder, or delete the record") from None
        return image

    def limited(self, image):
        if self.template.head:
            return image.convert("RGB")
        resample = self.template.resample
        for limit, is_beyond in ((self.flags.image_max_pixels, int.__gt__), (self.flags.image_min_pixels, int.__lt__)):
            if limit is not None and is_beyond(image.width * image.height, limit):
                scale = math.sqrt(limit / (image.width * image.height))
                image = image.resize((int(image.width * scale), int(image.height * scale)), resample)
        image = image.convert("RGB")
        return self.stretched(image) if self.template.stretches else image

    @staticmethod
    def stretched(image):
        if min(image.size) < LEAST_SIDE:
            image = image.resize(tuple(max(side, LEAST_SIDE) for side in image.size))
        if image.width / image.height > LONGEST:
            image = image.resize((image.height * CUT_TO, image.height))
        if image.height / image.width > LONGEST:
            image = image.resize((image.width, image.width * CUT_TO))
        return image

    def open_sound(self, folder, path):
        """The path of a clip, which lies in the folder or is whole."""
        inside = os.path.join(folder, path)
        return inside if os.path.isfile(inside) else path

    def tokenise(self, where, tokenizer, system, texts, learnt, pictures, sounds):
        """Tokens and loss mask; `pictures`, `sounds`: the placeholder texts of the images and clips."""
        form, turns = self.template, []
        pictures = iter([form.picture.format(each) for each in pictures])
        sounds = iter([form.sound.format(each) for each in sounds])
        if form.has_ends and tokenizer.eos_token_id is None:
            raise InputError(f"the tokenizer of {self.flags.tokenizer_model} names no eos_token, which ends an answer; "
                             "name one in its tokenizer_config.json")
        system = system or form.system
        for number, text in enumerate(texts):
            answers = number % 2 == 1
            if answers and form.thoughts and self.flags.disable_thinking:
                text = without_thoughts(text, *form.thoughts)
            thoughtless = answers and form.thoughts and not any(word in text for word in form.thoughts)
            for place, items in ((PLACE, pictures), (SOUND_PLACE, sounds)):
                before, *rest = text.split(place)
                text = before + "".join(next(items) + part for part in rest)
            parts = [(form.answer if answers else form.question).format(text)]
            if number == 0 and system:
                parts.insert(0, form.system_form.format(system))
            if number == 0 and form.prefix:
                parts.insert(0, form.prefix)
            tokens = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
            if form.has_ends and number == 0 and tokenizer.bos_token_id is not None:
                tokens.insert(0, tokenizer.bos_token_id)
            if thoughtless:
                empty = tokenizer("{}\n\n{}\n\n".format(*form.thoughts), add_special_tokens=False)["input_ids"]
                if self.flags.disable_thinking:
                    turns[-1] += empty
                else:
                    tokens = empty + tokens
            turns.append(tokens + [tokenizer.eos_token_id] * (form.has_ends and answers))
        pairs = list(zip(turns[::2], turns[1::2], learnt[::2], learnt[1::2]))
        tokens, mask = self.cut_off(pairs, tokenizer) if form.head else self.cut(pairs, tokenizer)
        for mark in (form.mark, form.sound_mark):
            mark = tokenizer.convert_tokens_to_ids(mark)
            if mark == tokenizer.unk_token_id:
                continue
            if tokens.count(mark) != sum(turn.count(mark) for turn in turns):
                raise RecordError(f"{where}: --cutoff-length {self.flags.cutoff_length} cuts a picture or a clip; give "
                                  "more, smaller pictures by --image-max-pixels, or delete the record")
        return tokens, mask

    def cut_off(self, pairs, tokenizer):
        head = len(tokenizer(self.template.head, add_special_tokens=False)["input_ids"])
        tokens, mask = [], b""
        for question, answer, *learnt in pairs:
            said = len(answer) - head - 1
            tokens += question + answer
            mask += bytes([learnt[0]]) * len(question) + bytes(head) + bytes([learnt[1]]) * said + bytes(1)
        return tokens[:self.flags.cutoff_length], mask[:self.flags.cutoff_length]

    def cut(self, pairs, tokenizer):
        """`pairs`: (tokens of the question, tokens of the answer, whether each of them is learnt)"""
        room = self.flags.cutoff_length or sum(len(question) + len(answer) for question, answer, _, _ in pairs) + 1
        end = [tokenizer.eos_token_id] if self.template.ends_with_eos else []
        room -= len(end)
        last_first = bool(self.flags.mask_history)
        kept = []
        for number, (question, answer, *learnt) in enumerate(reversed(pairs) if last_first else pairs):
            if room <= 0:
                break
            asked, said = shares(len(question), len(answer), room)
            room -= asked + said
            learns = learnt[1] and not (last_first and number > 0)
            kept.append((question[:asked] + answer[:said], bytes([learnt[0]]) * asked + bytes([learns]) * said))
        if last_first:
            kept.reverse()
        tokens = [token for part, _ in kept for token in part]
        return tokens + end, b"".join(mask for _, mask in kept) + b"\1" * len(end)
