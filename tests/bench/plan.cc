// How long a plan takes: Llama-3.1-405B with Adam's moments, 16 384 ranks, tp8-pp16-dp128 ->
// tp4-pp16-dp256, and halves and quarters of its depth; with fsdp at the end, where every rank has
// parts of its own. Ratios: time for each (tensor, distinct shard), of the smallest = 1; memory
// beside.
//
// Then the same on a cluster, with where ranks and files go: DeepSeek-V3 (256 experts) with Adam's
// moments, 16 384 ranks on 1 000 nodes, and a quarter of all that: layers, ranks and nodes. Ratios:
// time for each array that some node has, of the quarter = 1. Each case is a process of its own.
//
//   ptc_plan_bench [llama | replicated | zero1 | fsdp]... [quarter]
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reshard/plan/planner.h"
#include "store/codec/safetensors.h"
#include "tests/bench/models.h"
#include "tests/bench/plan_cluster.h"
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
      const uint64_t bytes = array_bytes(held.part->local_shape, dtype).value();
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

void plan_llama() {
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

/// What a process that only does this makes of it, and its peak of memory.
template <class Made>
std::pair<Made, double> in_a_process(const std::function<Made()>& make) {
  struct Answer {
    Made made;
    double peak;
  } answer{};
  int ends[2];
  PTC_CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  PTC_CHECK(child >= 0);
  if (child == 0) {
    answer.made = make();
    answer.peak = peak_gib();
    _exit(write(ends[1], &answer, sizeof answer) == sizeof answer ? 0 : 1);
  }
  close(ends[1]);
  const ssize_t got = read(ends[0], &answer, sizeof answer);
  close(ends[0]);
  int status = 0;
  PTC_CHECK(waitpid(child, &status, 0) == child && got == sizeof answer);
  return {answer.made, answer.peak};
}

void plan_deepseek(const char* name, OptimizerCut cut, bool full) {
  fmt::print("\nDeepSeek-V3, {}: seconds of\n{:27}", name, "");
  for (const char* column : {"files", "settle", "stored", "wanted", "place", "plan", "report"})
    fmt::print(" {:>6}", column);
  fmt::print(" {:>6} {:>6} {:>9} {:>7} {:>5} {:>5}\n", "ms/part", "ms/set", "arrays", "of part",
             "ratio", "GiB");
  struct Case {
    const char *name, *from, *to;
    int layers;
    size_t nodes;
  };
  std::vector<Case> cases{
      {"4 096 ranks, 250 nodes", "tp1-pp4-dp16-ep64", "tp1-pp2-dp16-ep128", 15, 250}};
  if (full)
    cases.push_back(
        {"16 384 ranks, 1 000 nodes", "tp1-pp16-dp16-ep64", "tp1-pp8-dp16-ep128", 61, 1000});
  for (const uint32_t replicas : {0u, 1u}) {
    double unit = 0;
    for (const Case& one : cases) {
      const auto [times, peak] = in_a_process<bench::ClusterTimes>([&] {
        return bench::plan_on_cluster(
            {bench::deepseek_v3(one.layers), one.from, one.to, cut, one.nodes, replicas});
      });
      const double each = (times.place + times.plan) / static_cast<double>(times.arrays);
      if (unit == 0) unit = each;
      fmt::print("{:27}", fmt::format("{}{}", one.name, replicas > 0 ? ", 1 copy" : ""));
      for (const double seconds : {times.files, times.settle, times.stored, times.wanted,
                                   times.place, times.plan, times.report})
        fmt::print(" {:6.2f}", seconds);
      fmt::print(" {:7.1f} {:6.2f} {:9} {:7} {:5.2f} {:5.2f}\n", times.part * 1e3, times.sets * 1e3,
                 times.arrays, times.part_arrays, each / unit, peak);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace ptc

int main(int count, char** given) {
  using namespace ptc;
  std::set<std::string> which(given + 1, given + count);
  const bool full = which.erase("quarter") == 0;
  if (which.empty()) which = {"llama", "replicated", "zero1", "fsdp"};
  if (which.contains("llama")) plan_llama();
  if (which.contains("replicated")) plan_deepseek("replicated", OptimizerCut::kReplicated, full);
  if (which.contains("zero1")) plan_deepseek("zero1", OptimizerCut::kZero1, full);
  if (which.contains("fsdp")) plan_deepseek("fsdp", OptimizerCut::kFsdp, full);
}
