// A double of `Program` without ExecuTorch. It aborts on tokens outside the vocabulary and positions outside the
// sequence: ExecuTorch's kernels refuse them at best, with an error that does not name them.
#include "cases.hpp"

#include "frames.hpp"
#include "plan.hpp"
#include "program.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace mobizo {

struct Program::Runtime {
  fuzz::Behaviour behaviour;
  fuzz::Random random{0};
  int32_t calls = 0;
  int64_t vocabulary = 0;
  bool trains = false; // inputs of `step`, `prefix` and `score` come from a plan
};

namespace {

[[noreturn]] void stop(const std::string &method) {
  throw std::runtime_error("method '" + method + "' of the program stopped (ExecuTorch error 18)");
}

void check_indices(const std::string &method, const Tensor &tensor, int64_t count) {
  for (size_t i = 0; i < tensor.count(); ++i) {
    const int64_t index = tensor.data<int64_t>()[i];
    if (index < 0 || index >= count) {
      std::fprintf(stderr, "%s was called with index %lld of %lld\n", method.c_str(), static_cast<long long>(index),
                   static_cast<long long>(count));
      std::abort();
    }
  }
}

Tensor random_floats(std::vector<int32_t> shape, fuzz::Random &random) {
  Tensor tensor(Type::Float, std::move(shape));
  for (size_t i = 0; i < tensor.count(); ++i) {
    tensor.data<float>()[i] = static_cast<float>(random.between(-100, 100)) / 50.0F;
  }
  return tensor;
}

void spoil(std::vector<Tensor> &outputs, fuzz::Random &random) {
  Tensor &tensor = outputs[random.below(outputs.size())];
  switch (random.below(6)) {
  case 0:
    outputs.pop_back();
    break;
  case 1:
    tensor = Tensor(Type::Int64, tensor.shape);
    break;
  case 2:
    tensor = Tensor(Type::Float, {0});
    break;
  case 3:
    tensor = random_floats({static_cast<int32_t>(random.between(1, 3)), 2}, random);
    break;
  case 4:
    tensor.shape.push_back(1);
    break;
  default:
    if (tensor.type == Type::Float && tensor.count() > 0) {
      const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::max()};
      tensor.data<float>()[random.below(tensor.count())] = bad[random.below(3)];
    }
  }
}

} // namespace

Program::Program(const std::string &program, const std::string &, const std::string &, bool)
    : runtime_(std::make_unique<Runtime>()) {
  const std::string bytes = read_file(program);
  if (bytes.size() < sizeof(fuzz::Behaviour)) {
    throw std::runtime_error("the program does not load (ExecuTorch error 35)");
  }
  std::memcpy(&runtime_->behaviour, bytes.data(), sizeof(fuzz::Behaviour));
  runtime_->random = fuzz::Random(static_cast<uint64_t>(runtime_->behaviour.seed));
  // A plan for a larger vocabulary is another program's.
  const std::vector<fuzz::Record> plan = fuzz::split(read_file(program.substr(0, program.rfind('/')) + "/plan.bin"));
  runtime_->trains = !plan.empty();
  if (!plan.empty() && plan[0].payload.size() >= sizeof(Settings)) {
    Settings settings;
    std::memcpy(&settings, plan[0].payload.data(), sizeof settings);
    runtime_->vocabulary = std::max<int64_t>(runtime_->behaviour.vocabulary, settings.vocabulary);
  }
}

Program::~Program() = default;

bool Program::has(const std::string &method) const { return method != "none"; }

std::vector<Tensor> Program::call(const std::string &method, const std::vector<Tensor> &inputs) {
  Runtime &r = *runtime_;
  const fuzz::Behaviour &b = r.behaviour;
  struct sigaction action {};
  sigaction(SIGTERM, nullptr, &action);
  if (++r.calls == b.stop_after && action.sa_handler != SIG_DFL) { // only a run that trains can be stopped
    std::raise(SIGTERM);
  }
  const bool takes_tokens = method == "step" || method == "prefix" || method == "score";
  if (r.trains && takes_tokens) {
    const Tensor &tokens = inputs.at(0);
    check_indices(method, tokens, r.vocabulary);
    if (inputs.size() > 2) {
      check_indices(method, inputs[1], tokens.shape.at(1));
      check_indices(method, inputs[2], r.vocabulary);
    }
  }
  if (r.trains && (method == "suffix" || method == "score_suffix")) {
    check_indices(method, inputs.at(1), inputs[0].shape.at(1));
    check_indices(method, inputs.at(2), r.vocabulary);
  }
  if (b.overrun != 0 && !inputs.empty()) {
    volatile const uint8_t byte = inputs[0].bytes.data()[inputs[0].bytes.size()];
    (void)byte;
  }
  std::vector<Tensor> outputs;
  if (method == "adapter") {
    outputs.push_back(random_floats({b.size}, r.random));
  } else if (method == "state") {
    outputs.push_back(random_floats({b.state}, r.random));
  } else if (method == "load" || method == "restore") {
    if (inputs.size() != 1 || inputs[0].count() != static_cast<size_t>(method == "load" ? b.size : b.state)) {
      stop(method);
    }
    outputs.push_back(random_floats({1}, r.random));
  } else if (method == "replay") {
    outputs.push_back(random_floats({1}, r.random));
  } else if (method == "prefix") {
    outputs.push_back(random_floats({inputs[0].shape.at(0), inputs[0].shape.at(1), b.width}, r.random));
  } else if ((method == "score" || method == "score_suffix") && inputs.size() == 3 && inputs[2].count() <= 1 << 20) {
    outputs.push_back(random_floats(inputs[2].shape, r.random));
  } else if (method == "step" || method == "suffix") {
    const auto seeds = std::find_if(inputs.begin(), inputs.end(),
                                    [](const Tensor &input) { return input.type == Type::Int32; });
    const int32_t queries = seeds == inputs.end() ? 1 : seeds->shape.at(0);
    const auto more = inputs.end() - seeds;
    if (more == 2) { // a private step with exact gradients: keys, then the totals so far
      outputs.push_back(inputs.back());
      outputs.push_back(random_floats({1}, r.random));
    } else {
      const bool paths = more == 3; // neither exact gradients nor a private step
      outputs.push_back(random_floats({paths ? 2 * queries : queries}, r.random));
      outputs.push_back(random_floats({queries}, r.random));
    }
  } else if (method == "extend") {
    outputs.push_back(random_floats({1, b.vocabulary}, r.random));
  } else {
    stop(method);
  }
  if (b.wrong_one_in > 0 && r.random.chance(static_cast<unsigned>(b.wrong_one_in))) {
    spoil(outputs, r.random);
  }
  return outputs;
}

void Program::load(const std::string &) {}

} // namespace mobizo
