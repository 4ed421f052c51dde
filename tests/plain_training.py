"""A step of training as PyTorch's tutorials write it, to compare with what `dfgnn.capture` makes of it."""

import torch

import dfgnn


def plain_step(loss_fn, optimizer, device=None, before_step=lambda: None):
    """A function of a batch: moves it to a device that is given, updates the parameters, gives the loss."""

    def step(*batch):
        optimizer.zero_grad()
        if device is not None:
            batch = [x.to(device) if hasattr(x, "to") else x for x in batch]
        loss = loss_fn(*batch)
        loss.backward()
        before_step()
        optimizer.step()
        return loss.detach()

    return step


def both_ways(device, make_net, make_loss, run, make_optimizer=None, **options):
    """What ``run(step, model)`` gives with a captured step and with a plain one, by SGD or the optimizer that
    is made of a model."""
    for captured in (True, False):
        torch.manual_seed(0)
        model = make_net().to(device)
        optimizer = make_optimizer(model) if make_optimizer else torch.optim.SGD(model.parameters(), lr=0.05)
        step = plain_step(make_loss(model), optimizer, device)
        if captured:
            step = dfgnn.capture(make_loss(model), model, optimizer, debug=device == "cpu", **options)
        yield run(step, model)


def is_captured(step):
    return hasattr(step, "replays")
