// Graphs as operators get them: as tensors, or, in eager calls, as the number under which the library stores
// a graph whose tensors were checked once (graph_handle). A Backend (CPU or CUDA) offers `check(checker, csr,
// num_edges)`, which checks the values in work items and splits if it can read them without waiting.
#pragma once

#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "checks.h"

namespace dfgnn {

// The first entries of the list `plan` of the schemas. If there are source partitions, the number of work
// items of each follows (Csr::part_items in params.h).
struct PlanArgs {
  int64_t num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges;
};
inline constexpr size_t kPlanArgs = sizeof(PlanArgs) / sizeof(int64_t);

template <class Backend>
struct Graphs {
  // ---- a graph's tensors -----------------------------------------------------------------------

  static PlanArgs plan_args(const Checker& check, const Sizes& plan) {
    if (plan.size() < kPlanArgs || plan.size() > kPlanArgs + kMostParts)
      check.require(false,
                    "plan: expected [num_slots, packed, heads_per_tile, num_rows, num_cols, num_edges] and "
                    "items of at most ",
                    kMostParts, " parts, got ", to_string(plan));
    for (int64_t number : plan) check.count("plan", number);
    return {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5]};
  }

  // Returns one direction of a graph, which has num_rows rows, and neighbours below num_cols. It checks what
  // can be seen without reading the tensors, and on the CPU also the work items and splits. schemas.h says
  // what is not checked. name: how error messages name the indices.
  static Csr csr(const Checker& check, const char* name, const Tensor& indices, const OptTensor& eids,
                 const Tensor& items, const Tensor& splits, const Sizes& plan, const OptTensor& tiles,
                 int64_t num_rows, int64_t num_cols) {
    const ScalarType i32 = ScalarType::Int;
    check.tensor(name, indices, {-1}, {i32});
    check.tensor("eids", eids, {indices.size(0)}, {i32});
    check.tensor("items", items, {-1, 4}, {i32});
    check.tensor("splits", splits, {-1, 4}, {i32});
    check.tensor("tiles", tiles, {-1, kTileInts}, {i32});
    check.require(indices.is_contiguous() && items.is_contiguous() && splits.is_contiguous() &&
                      (!eids || eids->is_contiguous()) && (!tiles || tiles->is_contiguous()),
                  "the graph's tensors: expected contiguous ones");
    const PlanArgs args = plan_args(check, plan);
    const int64_t num_edges = indices.size(0), num_items = items.size(0), num_splits = splits.size(0);
    check.require(args.num_rows == num_rows && args.num_cols == num_cols && args.num_edges == num_edges, name,
                  ": expected the graph of the plan, of ", args.num_rows, " rows, ", args.num_cols,
                  " columns and ", args.num_edges, " edges, got ", num_rows, ", ", num_cols, " and ",
                  num_edges);
    check.require(num_edges == 0 || (num_rows > 0 && num_cols > 0), name, ": edges without nodes");
    const int64_t rows_per_item = tiles ? kTileRows : 1;
    check.count("items", num_items);
    check.require(num_items * rows_per_item >= num_rows, "items: expected one or more for each of ", num_rows,
                  " rows, got ", num_items);
    check.require(num_splits <= args.num_slots && args.num_slots <= 2 * num_items * rows_per_item,
                  "plan: expected slots for ", num_splits, " split rows, of ", num_items, " items, got ",
                  args.num_slots);
    check.require(args.packed <= 1, "plan: expected packed = 0 or 1, got ", args.packed);
    check.require(!tiles || tiles->size(0) <= std::max<int64_t>(num_edges, 1),
                  "tiles: expected at most one chunk per edge");
    Csr c{};
    c.indices = static_cast<const int32_t*>(data(indices));
    c.eids = static_cast<const int32_t*>(data(eids));
    c.items = static_cast<const Item*>(data(items));
    c.splits = static_cast<const Split*>(data(splits));
    c.tiles = static_cast<const int32_t*>(data(tiles));
    c.num_items = num_items;
    c.num_splits = num_splits;
    c.num_slots = args.num_slots;
    c.num_rows = num_rows;
    c.packed = static_cast<int32_t>(args.packed);
    c.heads_per_tile = static_cast<int32_t>(args.heads_per_tile);
    int64_t in_parts = 0;
    for (size_t k = kPlanArgs; k < plan.size(); ++k) {
      c.part_items[c.num_parts++] = static_cast<int32_t>(plan[k]);
      in_parts += plan[k];
    }
    check.require(c.num_parts == 0 || (in_parts == num_items && !tiles), "plan: expected parts of ",
                  num_items, " items, got ", in_parts);
    Backend::check(check, c, num_edges);
    return c;
  }

  static Csr reverse_csr(const Checker& check, const OptTensor& rev_indices, const OptTensor& rev_eids,
                         const OptTensor& rev_items, const OptTensor& rev_splits, const Sizes& plan,
                         const OptTensor& tiles, const Shape& shape) {
    check.require(rev_indices && rev_items && rev_splits, "backward needs the reverse CSR and its plan");
    const Csr c = csr(check, "rev_indices", *rev_indices, rev_eids, *rev_items, *rev_splits, plan, tiles,
                      shape.num_src, shape.num_dst);
    check.require(rev_indices->size(0) == shape.num_edges, "rev_indices: expected ", shape.num_edges,
                  " edges, got ", rev_indices->size(0));
    return c;
  }

  // Checks that the plan has no source partitions (Csr::num_parts), or that dtype and head size allow them.
  // Work items of later partitions add to what is in the row already: in 16 bits each addition would round,
  // and kernels for heads above kWideBytes cannot add.
  static void check_parts(const Checker& check, const Csr& csr, DType dtype, const Shape& shape) {
    const int bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 0;
    check.require(csr.num_parts == 0 || (bytes && shape.value_dim * bytes <= kWideBytes),
                  "plan: expected parts only of float32 and float64 and heads of at most ", kWideBytes,
                  " bytes");
  }

  // ---- graphs by their number ------------------------------------------------------------------

  // A graph with its plans. `held` are the tensors that own the memory to which csr and reverse point.
  struct Graph {
    Sizes sizes;  // num_dst, num_src, num_edges
    torch::stable::Device device;
    Csr csr, reverse;
    bool has_reverse;
    std::vector<Tensor> held;
  };

  // The stored graphs. The registry is never destroyed, because at exit its tensors could be freed after
  // torch's own static objects.
  struct Registry {
    std::mutex mutex;
    std::unordered_map<int64_t, std::shared_ptr<const Graph>> all;
    int64_t last = 0;
    static Registry& get() {
      static Registry* registry = new Registry;
      return *registry;
    }
  };

  // The operator graph_handle: checks a graph, stores it, and returns its number.
  static int64_t graph_handle(Tensor indices, OptTensor eids, Tensor items, Tensor splits, Sizes plan,
                              OptTensor rev_indices, OptTensor rev_eids, OptTensor rev_items,
                              OptTensor rev_splits, Sizes rev_plan, OptTensor tiles, OptTensor rev_tiles) {
    const Checker check("dfgnn::graph_handle", indices);
    const PlanArgs args = plan_args(check, plan);
    auto graph = std::make_shared<Graph>(Graph{{args.num_rows, args.num_cols, args.num_edges},
                                               indices.device(),
                                               {},
                                               {},
                                               rev_indices.has_value(),
                                               {}});
    graph->csr =
        csr(check, "indices", indices, eids, items, splits, plan, tiles, args.num_rows, args.num_cols);
    if (graph->has_reverse) {
      Shape shape{};
      shape.num_dst = args.num_rows, shape.num_src = args.num_cols, shape.num_edges = args.num_edges;
      graph->reverse =
          reverse_csr(check, rev_indices, rev_eids, rev_items, rev_splits, rev_plan, rev_tiles, shape);
    }
    graph->held = {indices, items, splits};
    for (const OptTensor* t : {&eids, &rev_indices, &rev_eids, &rev_items, &rev_splits, &tiles, &rev_tiles})
      if (*t) graph->held.push_back(**t);
    return keep(std::move(graph));
  }

  // Stores a graph under a new number, which it returns.
  static int64_t keep(std::shared_ptr<const Graph> graph) {
    Registry& graphs = Registry::get();
    const std::lock_guard<std::mutex> lock(graphs.mutex);
    graphs.all.emplace(++graphs.last, std::move(graph));
    return graphs.last;
  }

  // Removes a graph. Python's finalizers call this, in any thread. It is not an operator, because garbage may
  // be collected under any dispatch mode.
  static void drop_graph(int64_t number) {
    std::shared_ptr<const Graph> dropped;  // its tensors are freed after the lock is released
    Registry& graphs = Registry::get();
    const std::lock_guard<std::mutex> lock(graphs.mutex);
    const auto found = graphs.all.find(number);
    if (found == graphs.all.end()) return;
    dropped = std::move(found->second);
    graphs.all.erase(found);
  }

  // Returns the graph with this number, and checks that it is on the device of `like`. backward: whether it
  // must have its reverse CSR.
  static std::shared_ptr<const Graph> stored(const Checker& check, int64_t number, const Tensor& like,
                                             bool backward) {
    std::shared_ptr<const Graph> graph;
    {
      Registry& graphs = Registry::get();
      const std::lock_guard<std::mutex> lock(graphs.mutex);
      const auto found = graphs.all.find(number);
      if (found != graphs.all.end()) graph = found->second;
    }
    check.require(bool(graph), "graph: expected a number that graph_handle gave, got ", number);
    check.require(graph->device == like.device(), "graph: expected one on the device of the features");
    check.require(!backward || graph->has_reverse, "graph: expected one with its reverse CSR");
    return graph;
  }
  // `stored`, and checks that `value` has a row for each of the graph's sources.
  static std::shared_ptr<const Graph> graph_of(const Checker& check, int64_t number, const Tensor& value,
                                               bool backward) {
    std::shared_ptr<const Graph> graph = stored(check, number, value, backward);
    check.require(value.dim() == 3 && value.size(0) == graph->sizes[1], "value: expected shape [",
                  graph->sizes[1], ", heads, size]: a row for each source of the graph");
    return graph;
  }
};

}  // namespace dfgnn
