"""The forms in which preferences are published, as a question with its answers.

Pairs, a chosen and a rejected answer of one question:
    {"prompt": ..., "chosen": ..., "rejected": ...}                 TRL; all texts, or all lists of messages
    {"chosen": ..., "rejected": ...}                                TRL; the question is what both begin with
    {"instruction": "...", "input": "...", "chosen": "...", "rejected": "..."}  ROLL, LLaMA-Factory; input may be absent
    {"conversations": [turns], "chosen": turn, "rejected": turn}    LLaMA-Factory; also "messages"
with an optional number "margin". Single answers, which are good or bad:
    {"prompt": ..., "completion": ..., "label": true}               TRL
    {"conversations": [turns], "kto_tag": true}                     LLaMA-Factory; also "messages", or instruction and
                                                                    output, and "label" for the tag
"""

from typing import NamedTuple

from conversation_forms import FORMS, ROLES, UNREAD, Completion, Conversation, read, text_in
from preprocess_input import RecordError

PAIRS, SINGLES = "pairs", "single answers"
QUESTIONS = {key: form for form, key in FORMS.items() if form != "completion"}
TAGS = ("kto_tag", "label")
MOST = 3.4e38  # about float32's limit
OWN_KEYS = ("prompt", "chosen", "rejected", "margin", "completion", *TAGS)


class Answer(NamedTuple):
    of: Conversation | Completion  # with the question before it
    turns: int = 0  # of the answer, the last messages of a Conversation


class Preference(NamedTuple):
    answers: list  # chosen and rejected, or one
    values: dict  # margin or desirable: of each of its conversations


class Kind(NamedTuple):
    """What all records of a set have in common."""
    name: str
    has_margin: bool = False


def kind_of(where, item):
    if isinstance(item, RecordError):
        raise item
    has = {key for key, value in item.items() if value is not None} if isinstance(item, dict) else set()
    pair, single = {"chosen", "rejected"} <= has, bool(has & {"completion", *TAGS})
    if pair and single:
        more = " and ".join(repr(key) for key in ("completion", *TAGS) if key in has)
        raise RecordError(f"{where}: the record has a pair of answers and {more}; delete one of the two")
    if pair:
        return Kind(PAIRS, "margin" in has)
    if has & set(TAGS):
        return Kind(SINGLES)
    found = ", ".join(sorted(map(str, has))) or "none" if isinstance(item, dict) else "no JSON object"
    raise RecordError(f"{where}: this is no preference: it has neither chosen and rejected nor {' or '.join(TAGS)} (it "
                      f"has {found}); correct or delete it")


def preference_of(where, item, kind, knows_developer=False):
    """The Preference of a record of a set of that kind."""
    own = kind_of(where, item)
    if own.name != kind.name:
        raise RecordError(f"{where}: the record is of {own.name}, the set's first of {kind.name}; give each kind a set "
                          "of its own")
    if own.has_margin != kind.has_margin:
        raise RecordError(f"{where}: the record has {'a' if own.has_margin else 'no'} 'margin', unlike the set's "
                          "first; give it to all or to none")
    reader = Reader(where, item, knows_developer)
    if kind.name == PAIRS:
        values = {"margin": margin_of(where, item["margin"])} if kind.has_margin else {}
        return Preference(reader.pair(), values)
    return Preference([reader.single()], {"desirable": float(tag_of(where, item))})


def margin_of(where, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST:
        raise RecordError(f"{where}: 'margin' is {str(value)[:20]}, which is no number of float32; correct or delete "
                          "the record")
    return float(value)


def tag_of(where, item):
    given = {key: item[key] for key in TAGS if item.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise RecordError(f"{where}: {key!r} is {value!r}; an answer is good or bad: give true or false")
    if len(set(given.values())) > 1:
        raise RecordError(f"{where}: {' and '.join(map(repr, given))} contradict each other; delete one")
    return next(iter(given.values()))


class Reader:
    """Puts question and answer together as a record of conversation_forms.py, which reads it."""

    def __init__(self, where, item, knows_developer):
        self.where, self.item, self.knows_developer = where, item, knows_developer
        self.rest = {key: value for key, value in item.items() if key not in OWN_KEYS}
        self.question = self.question_key()

    def question_key(self):
        """The key of the question, or None; as in TRL a prompt comes before any other."""
        if self.item.get("prompt") is not None:
            return "prompt"
        has = [key for key in QUESTIONS if self.item.get(key) is not None]
        if len(has) > 1:
            raise RecordError(f"{self.where}: the record has {' and '.join(has)}, each of which may be the question; "
                              "delete one of them")
        return has[0] if has else None

    def pair(self):
        chosen, rejected, before = self.item["chosen"], self.item["rejected"], self.item.get(self.question)
        if self.question is None or self.question == "prompt" and isinstance(before, str) and isinstance(chosen, list):
            before, chosen, rejected = self.shared_beginning(chosen, rejected)
        if self.question == "instruction":
            return [self.of_instruction(key) for key in ("chosen", "rejected")]
        return [self.answered(before, "chosen", chosen), self.answered(before, "rejected", rejected)]

    def single(self):
        completion = self.item.get("completion")
        if self.question == "prompt" and completion is not None:
            return self.answered(self.item["prompt"], "completion", completion)
        if self.question not in QUESTIONS or completion is not None:
            raise RecordError(f"{self.where}: a tagged answer has 'prompt' and 'completion', or one of "
                              f"{', '.join(QUESTIONS)}; complete or delete the record")
        conversation = read(self.where, self.rest, QUESTIONS[self.question], self.knows_developer)
        return self.whole(self.question, conversation, 1)

    def of_instruction(self, key):
        if self.rest.get("output") is not None:
            raise RecordError(f"{self.where}: an 'output' beside chosen and rejected has no place; delete it")
        given = {**self.rest, "output": text_in(self.where, self.item, key)}
        return Answer(read(self.where, given, "alpaca", self.knows_developer), 1)

    def answered(self, before, key, answer):
        """The answer `key` behind a prompt or turns."""
        if isinstance(before, str) and isinstance(answer, str):
            return Answer(read(self.where, {**self.rest, "prompt": before, "completion": answer}, "completion"))
        answer = [answer] if isinstance(answer, dict) else answer
        if not isinstance(before, list) or not isinstance(answer, list) or not answer:
            what = "list of turns" if isinstance(before, list) else "text"
            raise RecordError(f"{self.where}: {key!r} is no {what}, as the question before it is; give both as texts "
                              "or both as messages")
        if isinstance(answer[0], dict) and not is_answer(answer[0]):
            raise RecordError(f"{self.where}: {key!r} does not begin with a turn of the assistant; give the question "
                              "only before the answers, or only in them")
        of = self.question if self.question in QUESTIONS else "messages"
        unread = [(UNREAD, repr(of), "record")] if of != self.question and self.rest.get(of) is not None else []
        given = {**self.rest, of: [*before, *answer]}
        conversation = read(self.where, given, QUESTIONS[of], self.knows_developer)
        conversation = conversation._replace(told=(*conversation.told, *unread))
        return self.whole(key, conversation, len(answer))

    def whole(self, key, conversation, turns):
        """The Answer of these last turns, all of which is learnt."""
        for message, learnt in list(zip(conversation.messages, conversation.learnt))[-turns:]:
            if message["role"] == "assistant" and not learnt:
                raise RecordError(f"{self.where}: a turn of {key!r} is marked as not learnt; answers of preferences "
                                  "are learnt as a whole: delete the mark")
        return Answer(conversation, turns)

    def shared_beginning(self, chosen, rejected):
        """The question and the answers of two that begin with it, as TRL's extract_prompt divides them."""
        of_texts = isinstance(chosen, str) and isinstance(rejected, str)
        if not of_texts and not (isinstance(chosen, list) and isinstance(rejected, list)):
            raise RecordError(f"{self.where}: without a question 'chosen' and 'rejected' must be lists of messages, or "
                              "texts, that begin with it; give the question as 'prompt'")
        unread = [key for key, value in self.rest.items() if value is not None]
        if of_texts and unread:  # one of them may be the question
            raise RecordError(f"{self.where}: texts with {' and '.join(map(repr, unread))} beside them, none of which "
                              "is known as a question; name it 'prompt', or delete it")
        least = min(len(chosen), len(rejected))
        same = next((i for i in range(least) if chosen[i] != rejected[i]), least - 1)
        if of_texts and same > 0 and chosen[same] != rejected[same] and chosen[same - 1] == " ":
            same -= 1
        if same < 1 or not of_texts and is_answer(chosen[0]):
            raise RecordError(f"{self.where}: 'chosen' and 'rejected' do not begin with the same question; give it as "
                              f"'prompt', {'a text' if of_texts else 'a list of messages'}")
        return chosen[:same], chosen[same:], rejected[same:]


def is_answer(turn):
    return isinstance(turn, dict) and ROLES.get(str(turn.get("role", turn.get("from")))) == "assistant"
