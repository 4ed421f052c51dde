"""A step of training as PyTorch's tutorials write it, to compare with what `dfgnn.capture` makes of it."""


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
