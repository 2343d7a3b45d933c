"""What is learned beside the policy: critics, process rewards, heads.

A learner is two things. A hook of the seam `learners` (a frozen dataclass in `hooks/`) holds its numbers and has one
method, `attach(trainer, path) -> Worker`. The worker (a subclass of `Worker`) holds weights and optimizer. The trainer
calls it once per generation, in this order:

    generate -> [learn, if it learns "before"] -> predict -> rewards, select, advantage -> [learn, if "after"]
             -> attachments -> the policy's updates

* `predict` gives per-token (b, T) or per-row (b,) tensors under the names in `provides`; hooks read them as
  `scored.need(name)` (per token) or `scored.keys[name]` (per row), and ask for them in `needs`. It also runs in
  evaluation, everything else only in training.
* `learn` does all of the learner's updates on this generation. Its targets are fixed by then, so doing them here is
  the same as interleaving them with the policy's updates, and a checkpoint never falls inside. `Worker.fit` is the
  loop: passes, mini-batches over the rows of all processes, micro-batches, gradients summed over processes, clipping,
  one optimizer step each, nothing left in any `.grad`.
* loss, backward and optimizer are the learner's own. It cannot reach the policy's gradient, with one exception that
  its class must declare: `trains_policy = True`, whose `policy_term` is added to the policy's loss.
* `freezes_policy` is True while the policy must stand still (value pre-training): the policy's forward, backward and
  optimizer step are left out, weight decay included. It is asked before the learner learns from the generation.

Features, or log-probs, come from a `Body` (bodies.py): the policy's trunk, a LoRA adapter on the policy's own base, or
a model of its own. `Body.active()` switches adapters and restores them, gradients flags included, whatever happens
inside.

State is saved in every checkpoint (`state_dict`), bit for bit. The weights alone go to `_learners/` of a saved model,
which a push to the Hub leaves out.
"""

from .base import Worker
from .bodies import AdapterBody, Body, ModelBody, TrunkBody, make_body
from .team import Team

__all__ = ["AdapterBody", "Body", "ModelBody", "Team", "TrunkBody", "Worker", "make_body"]
