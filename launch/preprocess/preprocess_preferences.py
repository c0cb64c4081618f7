"""Preferences to a set of conversations, for training on them (docs/objectives.md).

Pairs become two conversations each, the chosen answer and then the rejected one; conversation.margin is written if the
records have one. Single answers with a label become two conversations each, too: the answer, and its partner, the same
question with the answer of another record, of which KTO's loss estimates a divergence; conversation.desirable is 1 for
good answers, and 0 for bad ones and for partners.

Tokens and mask are those of TRL's DPOTrainer and KTOTrainer: the answer is what a question with its answer has beyond
the tokens that the question alone has, with the template's generation prompt, and is learnt to its end.
"""

from conversation_forms import Completion
from conversation_writer import Pictures, Sample, Sounds
from preference_forms import PAIRS, kind_of, preference_of
from preprocess_conversations import (Encoder, common_length, encoded, fits, form_and_jobs, jobs_of, require_template,
                                      write_set)
from preprocess_input import FlagError, RecordError

KTO_BATCH_SIZE = 8
NO_ITEMS = (Pictures(), Pictures(), [], Sounds())
PROMPT_END = "the end of a question has other tokens before its answer, which are learnt"


class PreferenceEncoder(Encoder):
    """Makes the samples of a record, one for each answer."""

    def __init__(self, flags, kind):
        super().__init__(flags, "completion")
        self.kind = kind

    def encode_item(self, where, item, folder):
        knows_developer = "developer" in str(self.tokenizer.chat_template)
        preference = preference_of(where, item, self.kind, knows_developer)
        made, items = [], None
        for answer in preference.answers:
            if isinstance(answer.of, Completion):
                made.append((*self.tokens_of_completion(answer.of), NO_ITEMS, answer.of.told))
                continue
            require_template(self.model, self.tokenizer)
            conversation = self.checked(where, answer.of)
            if any(isinstance(message.get("content"), list) for message in conversation.messages[-answer.turns:]):
                raise RecordError(f"{where}: an answer has a picture, a video or a sound; only questions may have "
                                  "them: delete the record")
            items = items or self.items_of(where, conversation, folder)  # the same for both answers
            made.append((*self.tokens_of(where, conversation, answer.turns, items[1]), items[0],
                         [*conversation.told, *self.dropped(where, conversation)]))
        begin = min(common_length(prompt, tokens) for prompt, tokens, _, _ in made)
        if any(begin == len(tokens) for _, tokens, _, _ in made):
            raise RecordError(f"{where}: an answer adds no token to its question; correct or delete the record")
        told = [*made[0][3], *(each for each in made[-1][3] if each not in made[0][3])]
        told += [(PROMPT_END, "", "record")] if begin < len(made[0][0]) else []
        return [Sample(tokens, bytes(begin) + b"\1" * (len(tokens) - begin), *of_question[:3], [] if i else told,
                       of_question[3], preference.values) for i, (_, tokens, of_question, _) in enumerate(made)]

    def tokens_of(self, where, conversation, turns, places):
        """Of the question, and of it and its answer, the last `turns`."""
        texts = [self.chat.render(where, conversation, -turns, True), self.chat.render(where, conversation)]
        return [self.tokenizer(self.expanded(where, text, bytes(len(text)), places)[0],
                               add_special_tokens=False)["input_ids"] for text in texts]

    def dropped(self, where, conversation):
        return self.chat.dropped(where, conversation, self.chat.render(where, conversation))


def with_partners(records, batch_size, max_length):
    """Each answer and its partner; of every `batch_size` answers the partners are rotated by one, as in TRL's
    KTOTrainer."""
    batch = []
    for samples in records:
        if not isinstance(samples, list):
            yield samples
            continue
        batch += samples
        if len(batch) == batch_size:
            yield from rotated(batch, max_length)
            batch = []
    yield from rotated(batch, max_length)


def rotated(batch, max_length):
    for sample, other in zip(batch, batch[-1:] + batch[:-1]):
        question, answer = sample.mask.index(1), other.tokens[other.mask.index(1):]
        partner = sample._replace(tokens=(sample.tokens[:question] + answer)[:max_length],
                                  mask=(bytes(question) + b"\1" * len(answer))[:max_length], told=[],
                                  values={"desirable": 0.0})
        yield [sample, partner]


def preprocess(arguments):
    kind, jobs = form_and_jobs(arguments, jobs_of(arguments), kind_of)
    if kind.name == PAIRS and arguments.kto_batch_size is not None:
        raise FlagError("--kto-batch-size is about single answers with a label, and the input has pairs; leave it out")
    records = (samples if isinstance(samples, RecordError) or all(fits(arguments, sample) for sample in samples)
               else None for samples in encoded(arguments, PreferenceEncoder, (arguments, kind), jobs))
    if kind.name == PAIRS:
        write_set(arguments, records, "pair of answers")
    else:
        size = arguments.kto_batch_size or KTO_BATCH_SIZE
        write_set(arguments, with_partners(records, size, arguments.max_length), "answer")
