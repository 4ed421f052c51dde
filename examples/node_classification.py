"""Training on one graph whose nodes have classes; all nodes in every step."""

import torch
import torch.nn.functional as F
from harness import Task


class FullGraph(Task):
    """``model(*inputs)`` gives logits ``[N, classes]``; ``split`` has the nodes of train, valid and test."""

    def __init__(self, args, seed, model, inputs, labels, split, metric: str = "accuracy"):
        super().__init__(args, seed)
        self.model, self.inputs, self.labels, self.split, self.metric = model, inputs, labels, split, metric
        self.targets = labels[split["train"]]
        self.step = self.replayed(lambda: self.optimize(self.loss))
        self.predict = self.replayed(self.logits)

    def can_capture(self):
        return self.args.amp != "fp16"  # the scaler of gradients waits for the device

    def loss(self):
        return F.cross_entropy(self.model(*self.inputs)[self.split["train"]].float(), self.targets)

    def logits(self):
        with self.autocast():
            return self.model(*self.inputs).float()

    def epoch(self):
        return self.step()

    def scores(self):
        logits = self.last = self.predict()
        if self.metric == "ROC-AUC":
            from torchmetrics.functional.classification import binary_auroc

            margin = logits[:, 1] - logits[:, 0]
            parts = {k: self.split[k] for k in ("valid", "test")}
            return {k: float(binary_auroc(margin[i], self.labels[i])) for k, i in parts.items()}
        right = (logits.argmax(1) == self.labels).double()
        # One tolist() for all parts, so that the host waits for the device once.
        shares = torch.stack([right[i].mean() for i in self.split.values()]).tolist()
        return dict(zip(self.split, shares))
