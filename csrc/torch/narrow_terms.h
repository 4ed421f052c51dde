// Terms of an additive score in 16 bits, which eager calls hand to attention's operators (attention.h) as the
// caller's layer made them.
#pragma once

#include <array>

#include "linear.h"

namespace dfgnn {

// The terms of an additive score that have the features' 16 bits. Kernels read terms in the accumulation
// type: forward writes them so into the memory that it keeps for backward.
template <class Inputs>
struct NarrowTerms {
  std::array<OptTensor, 2> given;  // of sources and destinations
  std::array<void*, 2> wide{};

  NarrowTerms(const Checker& check, const Inputs& in, Workspace& kept) {
    const ScalarType type = in.type();
    if (Score(in.score) != Score::additive || type == in.acc()) return;
    const OptTensor* terms[] = {&in.src, &in.dst};
    for (int k = 0; k < 2; ++k) {
      const OptTensor& term = *terms[k];
      if (!term || term->scalar_type() != type) continue;
      check.tensor(k ? "dst" : "src", *term, {-1, -1}, {type});
      given[k] = term;
      kept.add(wide[k], true, {term->size(0), term->size(1)}, in.acc());
    }
  }
  // Puts the wide ones in their places, which forward writes first.
  void widen(Inputs& in, bool write) const {
    for (int k = 0; k < 2; ++k) {
      if (!given[k]) continue;
      const Tensor made = on_memory(wide[k], in.value, sizes_of(*given[k]), in.acc());
      if (write) copy(made, *given[k]);
      (k ? in.dst : in.src) = made;
    }
  }
  OptTensor gradient(int k, const OptTensor& wide_one) const {
    return given[k] && wide_one ? OptTensor(as_type(*wide_one, given[k]->scalar_type())) : wide_one;
  }
};

}  // namespace dfgnn
