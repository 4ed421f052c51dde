"""Random programs of DGL's API, which run with DGL and with dfgnn.compat and must see the same.

A program is a list of steps that are drawn from a seed alone: what a step does may depend on the graph, but
only through numbers that both libraries must agree on (sizes, types, names of features).
"""

import random

import torch

MESSAGES = [
    f"{a}_{op}_{b}" for a in "uve" for b in "uve" if a != b for op in ("add", "sub", "mul", "div", "dot")
] + ["copy_u", "copy_e"]
REDUCERS = ["sum", "mean", "max", "min"]
CROSS = ["sum", "mean", "max", "min", "stack"]
FIELDS = {"u": "h", "v": "k", "e": "w"}


class Program:
    """One program with one of the libraries, ``dgl`` or ``dfgnn.compat``; ``seen`` is what it saw, of
    ``done`` whole steps."""

    def __init__(self, library, function, seed):
        self.dgl, self.fn, self.draw = library, function, random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.seen, self.done = [], 0  # done: how many steps

    # ---- drawing ----------------------------------------------------------------------------------------

    def ids(self, size, count=None, distinct=False):
        if size == 0:
            return torch.zeros(0, dtype=torch.int64)
        count = self.draw.randint(0, min(size, 6)) if count is None else count
        if distinct:
            return torch.randperm(size, generator=self.torch)[:count]
        return torch.randint(size, (count,), generator=self.torch)

    def numbers(self, rows, shape):
        return torch.rand(rows, *shape, generator=self.torch, dtype=torch.float64) + 0.5

    def edges(self, num_src, num_dst):
        count = self.draw.choice([0, 1, 3, 12, 30]) if num_src and num_dst else 0
        return self.ids(num_src, count), self.ids(num_dst, count)

    def graph(self):
        """A graph of one type, or of several; with features."""
        idtype = self.draw.choice([torch.int32, torch.int64])
        if self.draw.random() < 0.5:
            size = self.draw.choice([1, 2, 5, 9])
            g = self.dgl.graph(self.edges(size, size), num_nodes=size, idtype=idtype)
        else:
            sizes = {kind: self.draw.choice([1, 3, 6]) for kind in "abc"[: self.draw.randint(1, 3)]}
            relations = [
                (self.draw.choice(list(sizes)), f"r{k}", self.draw.choice(list(sizes)))
                for k in range(self.draw.randint(1, 3))
            ]
            data = {r: self.edges(sizes[r[0]], sizes[r[2]]) for r in relations}
            # DGL loses types without relations in copies.
            sizes = {kind: n for kind, n in sizes.items() if any(kind in (r[0], r[2]) for r in relations)}
            g = self.dgl.heterograph(data, sizes, idtype=idtype)
        return self.with_features(g)

    def with_features(self, g):
        shape = self.draw.choice([(), (2,), (2, 3)])
        for kind in g.ntypes:
            for name in ("h", "k"):
                g.nodes[kind].data[name] = self.numbers(g.num_nodes(kind), shape)
        for relation in g.canonical_etypes:
            rows = g.num_edges(relation)
            g.edges[relation].data["w"] = self.numbers(
                rows, self.draw.choice([shape, shape[:-1] + (1,) * bool(shape)])
            )
        return g

    # ---- what is seen -------------------------------------------------------------------------------------

    def see(self, *values):
        self.seen.append(values)

    def see_graph(self, g):
        self.see(
            "graph",
            str(g.idtype),
            list(g.ntypes),
            g.canonical_etypes,
            g.srctypes,
            g.dsttypes,
            g.is_unibipartite,
        )
        for kind in dict.fromkeys(g.ntypes):
            self.see(
                kind, g.num_nodes(kind), g.batch_num_nodes(kind), dict(sorted(g.nodes[kind].data.items()))
            )
        for relation in g.canonical_etypes:
            part = g[relation]
            self.see(relation, g.edges(etype=relation, form="all"), g.batch_num_edges(relation))
            self.see(part.num_src_nodes(),
                     part.num_dst_nodes(), dict(sorted(g.edges[relation].data.items())))  # fmt: skip

    # ---- steps ----------------------------------------------------------------------------------------

    def built_in(self, g, relation, message=None):
        name = message or self.draw.choice(MESSAGES)
        if (
            "dot" in name
            and "e" in name
            and g.edges[relation].data["w"].shape[-1:] != (g.nodes[relation[0]].data["h"].shape[-1:])
        ):
            name = name.replace("dot", "mul")  # DGL's dot does not broadcast the last dimension
        ends = [part for part in name.split("_") if part in FIELDS]
        if "div" in name and self.has_zeros(g, relation, name[-1]):
            name = name.replace("div", "sub")  # DGL's max and min leave out NaN
        made = getattr(self.fn, name)(*(FIELDS[end] for end in ends), "m")
        return made, getattr(self.fn, self.draw.choice(REDUCERS))("m", "out")

    @staticmethod
    def has_zeros(g, relation, end):
        frames = {"u": g.nodes[relation[0]], "v": g.nodes[relation[2]], "e": g.edges[relation]}
        return bool((frames[end].data[FIELDS[end]] == 0).any())

    def functions(self, g, relation):
        """A message and a reduce function, built-in or in Python."""
        message, reducer = self.built_in(g, relation)
        if self.draw.random() < 0.3:
            message = lambda edges: {"m": edges.src["h"] + edges.dst["k"]}  # noqa: E731
        if self.draw.random() < 0.3:
            reducer = lambda nodes: {"out": nodes.mailbox["m"].prod(1) + len(nodes)}  # noqa: E731
        return message, reducer

    def relation(self, g):
        return self.draw.choice(g.canonical_etypes)

    def step_update_all(self, g):
        relation = self.relation(g)
        apply = self.draw.choice([None, lambda nodes: {"new": 2 * nodes.data["h"]}])
        with g.local_scope():
            g.update_all(*self.functions(g, relation), apply, etype=relation)
            self.see_graph(g)

    def step_update_all_relations(self, g):
        # DGL reads out of bounds where a relation has no edges, and needs one shape in all relations.
        shapes = {
            x.shape[1:] for r in g.canonical_etypes for x in (g.edges[r].data["w"], g.nodes[r[0]].data["h"])
        }
        if not all(map(g.num_edges, g.canonical_etypes)) or len(shapes) > 1:
            return
        reducer = self.draw.choice(["sum", "max", "min"])
        with g.local_scope():
            message, _ = self.built_in(g, None, self.draw.choice(["copy_u", "copy_e"]))
            g.update_all(message, getattr(self.fn, reducer)("m", "out"))
            self.see_graph(g)

    def step_apply_edges(self, g):
        relation = self.relation(g)
        with g.local_scope():
            if self.draw.random() < 0.4:
                which = self.ids(g.num_edges(relation), distinct=True).to(g.idtype)
                if len(which) == 0:
                    return
                g.apply_edges(
                    lambda edges: {"s": edges.src["h"] - edges.dst["k"]}, edges=which, etype=relation
                )
            else:
                g.apply_edges(self.built_in(g, relation)[0], etype=relation)
            self.see_graph(g)

    def step_apply_nodes(self, g):
        kind = self.draw.choice(g.ntypes)
        with g.local_scope():
            which = self.ids(g.num_nodes(kind), distinct=True).to(g.idtype)
            g.apply_nodes(lambda nodes: {"h": nodes.data["h"] * 2, "new": nodes.data["k"]}, which, ntype=kind)
            self.see_graph(g)

    def step_multi_update_all(self, g):
        chosen = [r for r in g.canonical_etypes if self.draw.random() < 0.8]
        self.draw.shuffle(chosen)
        functions = {}
        shape = {r: (g.nodes[r[0]].data["h"].shape, g.edges[r].data["w"].shape) for r in chosen}
        half = lambda nodes: {"out": nodes.data["out"] / 2}  # noqa: E731
        last = None
        for r in chosen:
            last = self.built_in(g, r, self.draw.choice(["copy_u", "u_mul_e"]))
            functions[r] = (*last, half) if self.draw.random() < 0.2 else last
        if not functions or len({s[0][1:] for s in shape.values()}) > 1:
            return
        with g.local_scope():
            g.multi_update_all(functions, self.draw.choice(CROSS))
            self.see_graph(g)

    def step_some_messages(self, g):
        relation = self.relation(g)
        with g.local_scope():
            kind = self.draw.choice(["send_and_recv", "pull", "push"])
            message, reducer = self.functions(g, relation)
            if kind == "send_and_recv":
                g.send_and_recv(
                    self.ids(g.num_edges(relation), distinct=True).to(g.idtype),
                    message,
                    reducer,
                    etype=relation,
                )
            elif kind == "pull":
                g.pull(
                    self.ids(g.num_nodes(relation[2]), distinct=True).to(g.idtype),
                    message,
                    reducer,
                    etype=relation,
                )
            else:
                g.push(
                    self.ids(g.num_nodes(relation[0]), distinct=True).to(g.idtype),
                    message,
                    reducer,
                    etype=relation,
                )
            self.see_graph(g)

    def step_questions(self, g):
        relation = self.relation(g)
        n_src, n_dst = g.num_nodes(relation[0]), g.num_nodes(relation[2])
        u, v = self.ids(n_src, 4).to(g.idtype), self.ids(n_dst, 4).to(g.idtype)
        self.see(
            "degrees",
            g.in_degrees(etype=relation),
            g.out_degrees(u, etype=relation),
            g.in_degrees(0, etype=relation),
        )
        *ends, eids = g.edges(form="all", order="srcdst", etype=relation)
        self.see("sorted", ends, eids.sort()[0])  # DGL's sort of edges with the same ends is not stable
        self.see("in", *(x.sort()[0] for x in g.in_edges(v.unique(), form="all", etype=relation)))
        self.see("out", *(x.sort()[0] for x in g.out_edges(u.unique(), form="all", etype=relation)))
        has = g.has_edges_between(u, v, etype=relation)
        self.see("between", has, g.has_nodes(torch.tensor([0, 50]).to(g.idtype), ntype=relation[0]))
        ends = g.find_edges(g.edge_ids(u[has], v[has], etype=relation), etype=relation) if has.any() else ()
        self.see("ids", ends, g.is_multigraph, g.is_homogeneous)
        for form in ("coo", "csr", "csc"):
            self.see(form, g.adj_tensors(form, etype=relation))
        self.see("adj", g.adj_external(etype=relation, transpose=self.draw.random() < 0.5).to_dense())

    def step_readouts(self, g):
        kind, relation = self.draw.choice(g.ntypes), self.relation(g)
        op, weight = self.draw.choice(REDUCERS), self.draw.choice([None, "k"])
        self.see("nodes", self.dgl.readout_nodes(g, "h", weight, op=op, ntype=kind))
        if g.num_edges(relation):  # DGL's mean of no edges at all is 0 / 0
            self.see("edges", self.dgl.readout_edges(g, "w", op=op, etype=relation))
        if g.num_nodes(kind):
            self.see("softmax", self.dgl.softmax_nodes(g, "h", ntype=kind))
        rows = self.numbers(g.batch_size, (2,))
        self.see(
            "broadcast",
            self.dgl.broadcast_nodes(g, rows, ntype=kind),
            self.dgl.broadcast_edges(g, rows, etype=relation),
        )

    def step_add_edges(self, g):
        relation = self.relation(g)
        u, v = self.ids(g.num_nodes(relation[0]) + 1, 3), self.ids(g.num_nodes(relation[2]) + 1, 3)
        w = g.edges[relation].data["w"]
        data = self.draw.choice([None, {"w": self.numbers(3, w.shape[1:])}])
        return self.dgl.add_edges(g, u.to(g.idtype), v.to(g.idtype), data, etype=relation)

    def step_add_nodes(self, g):
        kind = self.draw.choice(g.ntypes)
        count = self.draw.randint(1, 3)
        data = self.draw.choice([None, {"h": self.numbers(count, g.nodes[kind].data["h"].shape[1:])}])
        return self.dgl.add_nodes(g, count, data, ntype=kind)

    def step_remove_edges(self, g):
        relation = self.relation(g)
        gone = self.ids(g.num_edges(relation))
        return self.dgl.remove_edges(g, gone.to(g.idtype), etype=relation, store_ids=self.draw.random() < 0.3)

    def step_remove_nodes(self, g):
        kind = self.draw.choice(g.ntypes)
        gone = self.ids(max(g.num_nodes(kind) - 1, 0)).to(g.idtype)
        g = self.dgl.remove_nodes(g, gone, ntype=kind, store_ids=self.draw.random() < 0.3)
        # Of a batch DGL drops "_ID" that was there before.
        for features in (
            *(g.nodes[k].data for k in g.ntypes),
            *(g.edges[r].data for r in g.canonical_etypes),
        ):
            features.pop("_ID", None)
        return g

    def step_self_loops(self, g):
        loops = [r for r in g.canonical_etypes if r[0] == r[2]]
        if not loops:
            return None
        relation, kind = self.draw.choice(loops), self.draw.choice(["add", "remove", "transform"])
        if kind == "remove":
            return self.dgl.remove_self_loop(g, etype=relation)
        fill = self.draw.choice([1.0, 3, *REDUCERS])
        # DGL cannot add up "_ID", whose numbers are integers: only "w" is filled in where edges have ids.
        names = ["w"] if "_ID" in g.edges[relation].data else self.draw.choice([None, ["w"]])
        if kind == "transform":
            new = self.draw.random() < 0.3 and not any(r[1] == "self" for r in g.canonical_etypes)
            g = self.dgl.AddSelfLoop(fill_data=fill, new_etypes=new, edge_feat_names=["w"])(g)
            for r in g.canonical_etypes:
                if "w" not in g.edges[r].data:
                    g.edges[r].data["w"] = self.numbers(g.num_edges(r), g.nodes[r[0]].data["h"].shape[1:])
            return g
        return self.dgl.add_self_loop(g, edge_feat_names=names, fill_data=fill, etype=relation)

    def step_reverses(self, g):
        kind = self.draw.choice(["reverse", "both", "simple", "bidirected", "transform"])
        copies = {"copy_ndata": self.draw.random() < 0.5}
        if kind == "reverse":
            self.see_graph(self.dgl.reverse(g, **copies, copy_edata=self.draw.random() < 0.5))
        elif kind == "both":
            options = {"exclude_self": self.draw.random() < 0.7, "copy_edata": self.draw.random() < 0.5}
            self.see_graph(self.dgl.add_reverse_edges(g, ignore_bipartite=True, **copies, **options))
        elif kind == "simple":
            options = {
                "copy_edata": self.draw.random() < 0.5,
                "aggregator": self.draw.choice(["arbitrary", "sum", "mean"]),
            }
            options["return_counts"] = self.draw.choice([None, "count"])
            simple, mapping = self.dgl.to_simple(g, writeback_mapping=True, **copies, **options)
            self.see(mapping)
            self.see_graph(simple)
        elif kind == "transform":
            self.see_graph(self.dgl.AddReverse(self.draw.random() < 0.5, self.draw.random() < 0.5)(g))
        elif all(r[0] == r[2] for r in g.canonical_etypes):
            self.see_graph(self.dgl.to_bidirected(g, **copies))

    def step_subgraphs(self, g):
        kind = self.draw.choice(["nodes", "edges", "in", "out", "etype", "relation"])
        relabel = self.draw.random() < 0.5
        if kind == "nodes":
            nodes = {n: self.ids(g.num_nodes(n), distinct=True).to(g.idtype) for n in g.ntypes}
            part = self.dgl.node_subgraph(g, nodes, relabel_nodes=relabel)
        elif kind == "edges":
            edges = {r: self.ids(g.num_edges(r), distinct=True).to(g.idtype) for r in g.canonical_etypes}
            part = self.dgl.edge_subgraph(g, edges, relabel_nodes=relabel)
        elif kind in ("in", "out"):
            nodes = {n: self.ids(g.num_nodes(n), distinct=True).to(g.idtype) for n in g.ntypes}
            part = getattr(self.dgl, f"{kind}_subgraph")(g, nodes, relabel_nodes=relabel)
        elif kind == "etype":
            part = self.dgl.edge_type_subgraph(g, self.draw.sample(g.canonical_etypes, 1))
        else:
            part = g[self.relation(g)]
        self.see_graph(part)

    def step_batch(self, g):
        others = [self.dgl.add_nodes(g, 1, ntype=g.ntypes[0]), g]
        whole = self.dgl.batch([others[self.draw.randint(0, 1)] for _ in range(self.draw.randint(1, 3))])
        for part in self.dgl.unbatch(whole):
            self.see_graph(part)
        return whole

    def step_block(self, g):
        seeds = {n: self.ids(g.num_nodes(n), distinct=True).to(g.idtype) for n in g.ntypes}
        part = self.dgl.in_subgraph(g, seeds)
        block = self.dgl.to_block(part, seeds, include_dst_in_src=self.draw.random() < 0.8)
        self.see(block.srctypes, block.dsttypes, block.is_block, block.num_nodes(), block.num_edges())
        for kind in block.srctypes:
            self.see(kind, dict(sorted(block.srcnodes[kind].data.items())))
        for kind in block.dsttypes:
            self.see(kind, dict(sorted(block.dstnodes[kind].data.items())))
        for r in block.canonical_etypes:
            self.see(r, block.edges(etype=r, form="all"), dict(sorted(block.edges[r].data.items())))
        relation = self.draw.choice(block.canonical_etypes)
        block.update_all(
            *self.built_in(g, relation, self.draw.choice(["copy_u", "u_mul_e", "u_add_v"])), etype=relation
        )
        self.see(dict(sorted(block.dstnodes[relation[2]].data.items())))

    def step_conversion(self, g):
        if g.num_edges():  # DGL raises a TypeError without edges
            self.see_graph(self.dgl.to_homogeneous(g))
        self.see_graph(g.int())
        self.see(
            len(g.clone().ndata),
            g.local_var().num_nodes(),
            g.astype(torch.int64).in_degrees(etype=self.relation(g)),
        )
        if g.is_homogeneous:
            again = self.dgl.from_scipy(g.adj_external(scipy_fmt="csr"))
            self.see_graph(again)
        self.see_graph(self.dgl.metapath_reachable_graph(g, [self.relation(g)]))

    def run(self, steps):
        g = self.graph()
        self.see_graph(g)
        for _ in range(steps):
            name = self.draw.choice(STEPS)
            self.see(name)
            g = getattr(self, name)(g) or g
            self.see_graph(g)
            self.done += 1
        return self.seen


STEPS = sorted(name for name in vars(Program) if name.startswith("step_"))
