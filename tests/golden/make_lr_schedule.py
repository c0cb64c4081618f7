"""Writes lr_schedule.json: learning rates and weight decays of megatron-core's OptimizerParamScheduler.

    python tests/golden/make_lr_schedule.py > tests/golden/lr_schedule.json
"""

import json

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

BATCH = 8
COMMON = dict(init_lr=1e-6, max_lr=3e-4, min_lr=1e-5, lr_warmup_steps=5 * BATCH, lr_decay_steps=40 * BATCH,
              lr_decay_style='linear', start_wd=0.1, end_wd=0.1, wd_incr_steps=50 * BATCH, wd_incr_style='constant')
CASES = [
    {},
    dict(lr_decay_style='constant'),
    dict(lr_decay_style='cosine', lr_warmup_steps=0.03 * 40 * BATCH),
    dict(lr_decay_style='inverse-square-root'),
    dict(lr_decay_style='inverse-square-root', lr_warmup_steps=0),
    dict(lr_decay_style='WSD', wsd_decay_steps=15 * BATCH, lr_wsd_decay_style='exponential'),
    dict(lr_decay_style='WSD', wsd_decay_steps=15 * BATCH, lr_wsd_decay_style='linear'),
    dict(lr_decay_style='WSD', wsd_decay_steps=15 * BATCH, lr_wsd_decay_style='cosine'),
    dict(start_wd=0.01, end_wd=0.3, wd_incr_style='linear'),
    dict(start_wd=0.01, end_wd=0.3, wd_incr_style='cosine'),
]


class Optimizer:
    def __init__(self):
        self.param_groups = [dict(lr=0.0, weight_decay=0.0, wd_mult=1.0, default_config=True)]


def main():
    cases = []
    for changes in CASES:
        options = {**COMMON, **changes}
        optimizer = Optimizer()
        scheduler = OptimizerParamScheduler(optimizer, **options)
        group = optimizer.param_groups[0]
        lr, wd = [], []
        for _ in range(55):
            lr.append(group['lr'])
            wd.append(group['weight_decay'])
            scheduler.step(BATCH)
        cases.append(dict(options=options, lr=lr, weight_decay=wd, state=scheduler.state_dict()))
    print(json.dumps(dict(batch=BATCH, cases=cases)))


if __name__ == '__main__':
    main()
