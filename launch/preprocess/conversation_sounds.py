"""Clips of sound of records, by the model's feature extractor: mel spectrograms, and the text that stands for them."""

import os
from pathlib import Path

from conversation_writer import Sounds
from image_processors import placeholder
from preprocess_input import InputError, RecordError

CHUNK, FEATURES_OF_CHUNK = 100, 13  # frames that the tower convolves together (AudioConfig::chunk)


def features_of(frames):
    """Number of a clip's features: three convolutions halve the frames of each chunk."""
    rest = frames % CHUNK
    for _ in range(3):
        rest = (rest + 1) // 2
    return frames // CHUNK * FEATURES_OF_CHUNK + rest


class SoundReader:
    """The extractor is loaded when there is a clip."""

    def __init__(self, model, tokenizer):
        self.model, self.mark, self.extractor = model, placeholder(tokenizer, "audio"), None

    def sounds(self, where, paths):
        """Spectrograms and placeholder text of the clips. The extractor takes all of them at once, as the model's
        processor does: the shorter ones are silent at their ends."""
        if not paths:
            return Sounds(), []
        try:
            self.need_extractor()
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        clips = [self.samples_of(where, path) for path in paths]
        heard = self.extractor(clips, sampling_rate=self.extractor.sampling_rate, padding=True, truncation=False,
                               return_attention_mask=True, return_tensors="np")
        lengths = heard["attention_mask"].sum(-1).tolist()
        frames = b"".join(spectrum[:, :length].T.astype("<f4").tobytes()
                          for spectrum, length in zip(heard["input_features"], lengths))
        return Sounds(lengths, frames, heard["input_features"].shape[1]), [
            self.mark * features_of(length) for length in lengths]

    def need_extractor(self):
        if self.extractor is not None:
            return
        if self.mark is None:
            raise InputError(f"the tokenizer of {self.model} has no <|audio_pad|>; give the directory of a model that "
                             "hears")
        if not any((Path(self.model) / f"{name}_config.json").exists() for name in ("preprocessor", "processor")):
            raise InputError(f"{self.model} has no feature extractor (preprocessor_config.json); sound needs the "
                             "directory of a model that hears")
        from transformers import AutoFeatureExtractor
        try:
            self.extractor = AutoFeatureExtractor.from_pretrained(self.model)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"{self.model} has no feature extractor that transformers reads: {error}") from None

    def samples_of(self, where, path):
        """The clip in one channel at the extractor's rate."""
        import numpy
        try:
            import av
        except ImportError:
            raise InputError(f"{where}: sound needs the package av; install it") from None
        resampler = av.AudioResampler(format="flt", layout="mono", rate=self.extractor.sampling_rate)
        try:
            with av.open(path) as file:
                if not file.streams.audio:
                    raise RecordError(f"{where}: {path} has no sound; correct the path, or delete the record")
                parts = [part.to_ndarray() for frame in [*file.decode(audio=0), None]
                         for part in resampler.resample(frame)]
        except (av.error.FFmpegError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{where}: cannot read the sound {path}: {reason}; correct the path or the file, or "
                              "delete the record") from None
        samples = numpy.concatenate(parts, 1)[0] if parts else []
        if len(samples) < self.extractor.n_fft:  # a spectrum needs as many
            raise RecordError(f"{where}: {path} has {len(samples)} samples at {self.extractor.sampling_rate} a second, "
                              f"and a clip needs {self.extractor.n_fft}; delete the record")
        return samples


def sound_paths(folder, parts):
    return [os.path.join(folder, part["audio"]) for part in parts if part["type"] == "audio"]
