// How long a plan takes: Llama-3.1-405B with Adam's moments, 16 384 ranks, tp8-pp16-dp128 ->
// tp4-pp16-dp256, and halves and quarters of its depth; with fsdp at the end, where every rank has
// parts of its own. Ratios: time for each (tensor, distinct shard), of the smallest = 1; memory
// beside.
//
//   ptc_plan_bench
#include <fmt/format.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "reshard/plan/planner.h"
#include "store/codec/safetensors.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

struct Timing {
  double seconds = 0;
  size_t arrays = 0;  // of both sides: tensors × distinct shards
  TransferPlan::Totals totals;
};

std::vector<ImageLayout> images_of(const Model& model, const LayoutSpec& spec) {
  std::vector<ImageLayout> images(state_count(spec));
  for (uint32_t i = 0; i < images.size(); ++i) {
    uint64_t offset = 0;
    std::vector<Model::Held> all = model.hold(spec, state_at(spec, i)).value();
    for (Model::Held& held : all) {
      const DType dtype = model.tensors()[held.tensor].dtype;
      const uint64_t bytes = array_bytes(held.part.local_shape, dtype).value();
      images[i].arrays.push_back({held.tensor, offset, std::move(held.part)});
      offset += bytes;
    }
    images[i].bytes = offset;
  }
  return images;
}

Timing plan(const Model& model, const char* from, const char* to, OptimizerCut cut) {
  auto start = std::chrono::steady_clock::now();
  LayoutSpec before = LayoutSpec::from_name(from).value(),
             after = LayoutSpec::from_name(to).value();
  before.optimizer = after.optimizer = cut;
  std::vector<ImageLayout> held = images_of(model, before), wanted = images_of(model, after);
  std::vector<uint8_t> bits;
  for (const TensorInfo& tensor : model.tensors()) bits.push_back(dtype_bits(tensor.dtype));
  TransferPlan plan = plan_transfers(SourceIndex(held, bits), wanted).value();
  Timing timing;
  timing.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  timing.totals = plan.totals;
  for (const auto* images : {&held, &wanted})
    for (const ImageLayout& image : *images) timing.arrays += image.arrays.size();
  return timing;
}

std::string llama_405b(int layers) {
  return fmt::format(R"({{"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": {},
    "num_attention_heads": 128, "num_key_value_heads": 8, "intermediate_size": 53248,
    "vocab_size": 128256, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}})",
                     layers);
}

double peak_gib() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1 << 20);
}

}  // namespace
}  // namespace ptc

int main() {
  using namespace ptc;
  fmt::print("{:46} {:>8} {:>10} {:>8} {:>8}\n", "", "seconds", "arrays", "ratio", "peak GiB");
  struct Case {
    const char *name, *from, *to;
    int layers;
    OptimizerCut cut;
  };
  const Case cases[] = {
      {"32 layers, tp8-pp16-dp128 -> tp4-pp16-dp256", "tp8-pp16-dp128", "tp4-pp16-dp256", 32,
       OptimizerCut::kReplicated},
      {"63 layers", "tp8-pp16-dp128", "tp4-pp16-dp256", 63, OptimizerCut::kReplicated},
      {"126 layers", "tp8-pp16-dp128", "tp4-pp16-dp256", 126, OptimizerCut::kReplicated},
      {"126 layers, fsdp, tp8-pp16-dp8 -> tp8-pp16-dp16", "tp8-pp16-dp8", "tp8-pp16-dp16", 126,
       OptimizerCut::kFsdp}};
  std::vector<Timing> timings;
  for (const Case& one : cases) {
    Model model = testing::synthetic_model(llama_405b(one.layers), /*with_optimizer=*/true);
    timings.push_back(plan(model, one.from, one.to, one.cut));
    const Timing& last = timings.back();
    const Timing& unit = timings.front();
    fmt::print("{:46} {:8.3f} {:10} {:8.2f} {:8.2f}\n", one.name, last.seconds, last.arrays,
               (last.seconds / last.arrays) / (unit.seconds / unit.arrays), peak_gib());
  }
  std::puts("ratio: seconds for each array, of the first line = 1 (1 everywhere: linear)");
}
