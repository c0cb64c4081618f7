"""The text of a conversation by the model's chat template, and which of its characters are learnt."""

import re

from preprocess_input import RecordError

# Kinds of reports in addition to those of conversation_forms.py.
DROPPED = "the chat template does not write"
ANSWERS = "--training-form: answers differ from how the chat template repeats them later"
QUIET = {"role", "content", "tool_call_id"}  # an id is not expected in the text
MARK = "\u2042megashard\u2042"  # put into a message to locate it in the text


class ChatText:
    """`training_form`: renders each answer as if it were the last; otherwise as it is in the whole conversation."""

    def __init__(self, tokenizer, mask_history, training_form):
        self.tokenizer, self.mask_history, self.training_form = tokenizer, mask_history, training_form

    def template(self, tools=None):
        return self.tokenizer.get_chat_template(tools=tools)

    def render(self, where, conversation, end=None, generate=False, **more):
        """Text of the messages before `end`; `generate`: with the generation prompt."""
        try:
            return self.tokenizer.apply_chat_template(conversation.messages[:end], tools=conversation.tools,
                                                      add_generation_prompt=generate, **conversation.variables,
                                                      **more or {"tokenize": False})
        except Exception as error:  # templates raise any exception
            raise RecordError(
                f"{where}: the chat template refuses the messages: {error}; correct or delete the record") from None

    def of(self, where, conversation):
        """Returns (text, whether each character is learnt, notices)."""
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        learnt = [i for i in answers[-1 if self.mask_history else 0:] if conversation.learnt[i]]
        if self.training_form:
            text, mask, told = self.written_for_training(where, conversation, answers, learnt)
        elif re.search(r"{%-?\s*generation\s*-?%}", self.template(conversation.tools)):
            text, mask, told = *self.marked(where, conversation, answers, learnt), []
        else:
            text, mask, told = *self.written(where, conversation, learnt), []
        return text, mask, told + self.dropped(where, conversation, text)

    def span(self, where, conversation, i, text=None):
        """Range of answer i in the text rendered up to it, and that text; `text`: the whole must begin with it."""
        before = self.render(where, conversation, i, True)
        upto = self.render(where, conversation, i + 1)
        if text is not None and not text.startswith(upto):
            raise RecordError(f"{where}: the chat template writes an earlier answer in another way when later turns "
                              "come, so it is not what the model would have said; give --training-form, which writes "
                              "each answer as if it were the last, or give each answer to learn a record that ends "
                              "with it, and --mask-history, or mark what is learnt in the template by {% generation "
                              "%}")
        if not upto.startswith(before):
            raise RecordError(f"{where}: an answer does not begin with the chat template's generation prompt; give it "
                              "as the template expects it, with its reasoning for example, or correct the template")
        return len(before), len(upto.rstrip()), upto

    def written(self, where, conversation, learnt):
        text = self.render(where, conversation)
        mask = bytearray(len(text))
        for i in learnt:
            first, end, _ = self.span(where, conversation, i, text)
            mask[first:end] = b"\1" * (end - first)
        return text, mask

    def marked(self, where, conversation, answers, learnt):
        """By a template with {% generation %}; of answers that are not `learnt` nothing is."""
        text = self.render(where, conversation)
        mask = bytearray(len(text))
        marked = self.render(where, conversation, return_assistant_tokens_mask=True,
                             tokenizer_kwargs={"return_offsets_mapping": True})
        for (start, end), is_answer in zip(marked["offset_mapping"], marked["assistant_masks"]):
            mask[start:end] = bytes([is_answer]) * (end - start)
        if self.mask_history:
            first, _, _ = self.span(where, conversation, answers[-1], text)
            mask[:first if learnt else len(text)] = bytes(first if learnt else len(text))
        else:
            for i in set(answers) - set(learnt):
                first, _, upto = self.span(where, conversation, i, text)
                mask[first:len(upto)] = bytes(len(upto) - first)
        return text, mask

    def written_for_training(self, where, conversation, answers, learnt):
        """Questions and separators as in the whole, each answer as if it were the last."""
        text, mask, last = "", bytearray(), None
        for i in answers:
            first, end, upto = self.span(where, conversation, i)
            between = upto[:first] if last is None else self.between(where, conversation, last, i)
            text += between + upto[first:]
            mask += bytes(len(between)) + bytes([i in learnt]) * (end - first) + bytes(len(upto) - end)
            last = i
        told = [(ANSWERS, "", "conversation")] if text != self.render(where, conversation) else []
        return text, mask, told

    def between(self, where, conversation, last, i):
        """Text between the end of answer `last` and the beginning of answer i."""
        said = conversation.messages[last].get("content")  # text after its end follows the answer
        said = [*said, {"type": "text", "text": MARK}] if isinstance(said, list) else (said or "") + MARK
        marked = conversation._replace(messages=[*conversation.messages[:last],
                                                 {**conversation.messages[last], "content": said},
                                                 *conversation.messages[last + 1:]])
        upto = self.render(where, marked, last + 1).rpartition(MARK)
        whole = self.render(where, marked, i, True).rpartition(MARK)
        if not upto[1] or not whole[1] or not whole[2].startswith(upto[2]):
            raise RecordError(f"{where}: the chat template does not write answers one after the other, so there is no "
                              "--training-form of it; leave the flag out")
        return whole[2][len(upto[2]):]

    def dropped(self, where, conversation, text):
        """Parts of the messages that do not change the text."""
        messages, told, keys = conversation.messages, [], {}

        def without(messages, **parts):
            changed = conversation._replace(messages=messages, **parts)
            try:
                if not self.training_form:
                    return self.render(where, changed) == text
                answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
                return self.written_for_training(where, changed, answers, [])[0] == text
            except RecordError:  # needed, then
                return False

        if conversation.tools and without(messages, tools=None):
            told.append((DROPPED, "'tools'", "record"))
        names = self.template(conversation.tools)
        told += [(DROPPED, f"{name!r} of chat_template_kwargs", "record") for name in conversation.variables
                 if name not in names]
        for i, message in enumerate(messages):
            for key, value in message.items():
                if key not in QUIET and value not in ("", [], {}) and (key, message["role"]) != ("name", "tool"):
                    keys.setdefault(key, set()).add(i)
        for key, of in keys.items():
            def cut(some):
                return [{name: value for name, value in message.items() if name != key} if i in some else message
                        for i, message in enumerate(messages)]
            one_by_one = len(of) > 1 and not self.training_form  # the training form renders all answers in the same way
            lost = of if without(cut(of)) else [i for i in of if one_by_one and without(cut({i}))]
            told += [(DROPPED, repr(key), "message")] * len(lost)
        for i in self.unwritten(where, conversation):
            if without([*messages[:i], {**messages[i], "content": ""}, *messages[i + 1:]]):
                told.append((DROPPED, f"the content of {messages[i]['role']!r}", "message"))
        return told

    def unwritten(self, where, conversation):
        """Messages whose texts seem to be missing: what stands in their place is."""
        said = [i for i, message in enumerate(conversation.messages)
                if isinstance(message.get("content"), str) and message["content"].strip()]
        marked = [{**message, "content": f"{MARK}{i}{MARK}"} if i in said else message
                  for i, message in enumerate(conversation.messages)]
        try:
            text = self.render(where, conversation._replace(messages=marked))
        except RecordError:  # the template inspects the texts
            return said
        return [i for i in said if f"{MARK}{i}{MARK}" not in text]
