// Runs a package of AOTInductor without Python, for test_block_package.py:
//     run_package LIBRARY PACKAGE TENSORS
// LIBRARY is libdfgnn_cpu.so; TENSORS a list of the model's inputs and, last, the expected output.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int count, char** given) {
  if (count != 4) return std::cerr << "run_package LIBRARY PACKAGE TENSORS\n", 1;
  if (!dlopen(given[1], RTLD_NOW | RTLD_GLOBAL)) return std::cerr << dlerror() << "\n", 1;
  std::ifstream file(given[3], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<at::Tensor> tensors;
  const c10::IValue loaded = torch::pickle_load(bytes);
  for (const c10::IValue& value : loaded.toListRef()) tensors.push_back(value.toTensor());
  const at::Tensor expected = tensors.back();
  tensors.pop_back();
  torch::inductor::AOTIModelPackageLoader model(given[2]);
  const at::Tensor out = model.run(tensors).at(0);
  std::cout << "largest difference " << (out - expected).abs().max().item<double>() << "\n";
  return torch::allclose(out, expected, 1e-4, 1e-5) ? 0 : 2;
}
