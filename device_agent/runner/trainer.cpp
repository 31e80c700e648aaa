#include "trainer.hpp"

#include "frames.hpp"
#include "score.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

namespace mobizo {
namespace {

constexpr size_t RATE_STEPS = 20; // over which examples per second are averaged
constexpr double SLICE = 0.1;     // seconds of a pause between two looks whether to stop
constexpr double REPORT_SECONDS = 1; // between progress reports while a split is measured

bool finite(const std::vector<float> &numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](float value) { return std::isfinite(value); });
}

std::string_view bytes_of(const std::vector<float> &numbers) {
  return {reinterpret_cast<const char *>(numbers.data()), numbers.size() * sizeof(float)};
}

} // namespace

std::vector<float> numbers_of(const Tensor &tensor, size_t count) {
  if (tensor.type != Type::Float || tensor.count() != count) {
    throw std::runtime_error("the program gave " + std::to_string(tensor.count()) + " numbers in place of " +
                             std::to_string(count) + "; the program is another recipe's");
  }
  return {tensor.data<float>(), tensor.data<float>() + count};
}

Trainer::Trainer(const std::string &directory, const Plan &plan, Program &program, std::function<bool()> stop)
    : plan_(plan), program_(program),
      ledger_(directory + "/trajectory.bin", plan.header,
              static_cast<size_t>(plan.settings.queries) + (plan.pulls.empty() ? 0 : 1)),
      directory_(directory), stop_(std::move(stop)), prefix_(plan.settings, program) {
  if (ledger_.steps() > static_cast<size_t>(plan.settings.steps)) {
    throw std::runtime_error(directory + "/trajectory.bin has more steps than the run; move it away to start the run "
                                         "anew");
  }
}

void Trainer::train() {
  const auto steps = static_cast<size_t>(plan_.settings.steps), interval = static_cast<size_t>(plan_.settings.interval);
  restore(ledger_.steps());
  if (ledger_.steps() == 0) {
    evaluate("test", plan_.test);
  }
  // Evaluations that the ledger has are skipped: a kill may have come just before one or just after.
  while (ledger_.steps() < steps) {
    if (ledger_.steps() % interval == 0) {
      evaluate("validation", plan_.validation);
      if (ledger_.out_of_patience(plan_.settings.patience)) {
        break;
      }
    }
    step();
  }
  evaluate("validation", plan_.validation);
  conclude();
}

void Trainer::restore(size_t steps) {
  report_progress("loading");
  load_start();
  for (size_t step = 0; step < steps; ++step) {
    pulse();
    replay(step);
    if (!plan_.pulls.empty()) {
      pull(ledger_.numbers(step).back());
    }
  }
}

void Trainer::replay(size_t step) {
  std::vector<float> coefficients = ledger_.numbers(step);
  coefficients.resize(static_cast<size_t>(plan_.settings.queries));
  std::vector<Tensor> inputs{plan_.seeds_of(step), floats(coefficients)};
  if (plan_.settings.stored != 0) {
    inputs.push_back(scalar(static_cast<float>(plan_.settings.eps)));
  }
  program_.call("replay", inputs);
}

void Trainer::load_start() {
  const std::vector<float> zeros(static_cast<size_t>(plan_.settings.size));
  program_.call("load", {floats(plan_.start.empty() ? zeros : plan_.start)});
}

void Trainer::pull(float factor) {
  std::vector<float> flat = current();
  pull_towards_start(flat, factor);
  program_.call("load", {floats(flat)});
}

// Takes B, the first D numbers, back towards the start as shared/zo/proximal.py does. Each operation is rounded by
// itself, so the build must not contract them.
void Trainer::pull_towards_start(std::vector<float> &flat, float factor) const {
  for (size_t i = 0; i < static_cast<size_t>(plan_.settings.size); ++i) {
    const float start = plan_.start.empty() ? 0.0F : plan_.start[i];
    const float moved = flat[i] - start;
    const float left = moved * factor;
    flat[i] = start + left;
  }
}

std::vector<float> Trainer::current() const {
  return numbers_of(output_of(program_.call("adapter", {}), 0), static_cast<size_t>(plan_.settings.size));
}

void Trainer::step() {
  const size_t step = ledger_.steps();
  pulse();
  obey_limits();
  const Clock::time_point began = Clock::now();
  const float lr = plan_.lr[step];
  const std::vector<Tensor> results = move(step, lr);
  const std::vector<float> losses = numbers_of(output_of(results, 0), results[0].count());
  std::vector<float> coefficients = numbers_of(output_of(results, 1), static_cast<size_t>(plan_.settings.queries));
  if (losses.empty()) {
    throw std::runtime_error("the program gave no loss; the program is another recipe's");
  }
  if (!finite(losses) || !finite(coefficients)) {
    throw Diverged("training diverged at step " + std::to_string(step) + ": the loss is no number any more; lower lr");
  }
  if (plan_.pulls.empty()) {
    ledger_.append(coefficients);
  } else {
    coefficients.push_back(plan_.pulls[step]);
    ledger_.append(coefficients);
    pull(plan_.pulls[step]);
  }
  loss_ = std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
  const double seconds = seconds_since(began);
  step_seconds_.push_back(seconds);
  if (step_seconds_.size() > RATE_STEPS) {
    step_seconds_.pop_front();
  }
  report_progress("training", lr);
  train_seconds_ += seconds_since(began);
  pause(seconds * ledger_.limits().rest);
}

void Trainer::obey_limits() {
  const std::string text = read_file(directory_ + "/limits");
  Limits limits; // none if there is no file
  if (const size_t at = text.find("rest "); at != std::string::npos) {
    limits.rest = std::clamp(std::strtod(text.c_str() + at + 5, nullptr), 0.0, MOST_REST);
    limits.rest = std::isfinite(limits.rest) ? limits.rest : 0;
  }
  // A shorter example costs less only where the program takes any length and nothing of it is kept from before.
  const bool helps = plan_.settings.dynamic != 0 && plan_.settings.width == 0;
  if (const size_t at = text.find("length "); helps && at != std::string::npos) {
    limits.max_length = std::max(0LL, std::strtoll(text.c_str() + at + 7, nullptr, 10));
  }
  if (!limits.same(ledger_.limits())) {
    ledger_.append(limits);
  }
}

std::vector<Tensor> Trainer::move(size_t step, float lr) {
  return plan_.secret ? move_privately(step, lr) : call(step, lr, plan_.sample(step));
}

// A sample over E takes several calls. The last one adds the noise, and it alone moves B.
std::vector<Tensor> Trainer::move_privately(size_t step, float lr) {
  const std::vector<std::vector<int32_t>> pieces = plan_.pieces(step);
  const auto queries = static_cast<size_t>(plan_.settings.queries);
  std::vector<float> summed(queries);
  for (size_t piece = 0; piece + 1 < pieces.size(); ++piece) {
    pulse();
    const std::vector<Tensor> results = call(step, 0, pieces[piece], {scalar(plan_.clip), floats(summed)});
    summed = numbers_of(output_of(results, 0), queries);
  }
  for (size_t query = 0; query < queries; ++query) {
    summed[query] += plan_.noise[step * queries + query];
  }
  return call(step, lr, pieces.back(), {scalar(plan_.clip), floats(summed)});
}

std::vector<Tensor> Trainer::call(size_t step, float lr, const std::vector<int32_t> &indices,
                                  const std::vector<Tensor> &secret) {
  const int64_t most = ledger_.limits_at(step).max_length;
  if (most > 0 && plan_.settings.width > 0) {
    throw std::runtime_error("the ledger limits the length of a run whose prefix states are kept; remove the run");
  }
  std::vector<Example> shortened;
  std::vector<const Example *> examples;
  shortened.reserve(indices.size());
  for (const int32_t index : indices) {
    const Example &example = plan_.examples.at(static_cast<size_t>(index));
    if (most > 0) {
      shortened.push_back(example.shortened(static_cast<size_t>(most)));
    }
    examples.push_back(most > 0 ? &shortened.back() : &example);
  }
  std::vector<Tensor> inputs = plan_.pack(examples);
  const Clock::time_point began = Clock::now();
  if (plan_.settings.width > 0) {
    if (!upcoming_) {
      upcoming_.emplace(plan_.texts_from(step));
    }
    std::vector<const Tokens *> texts;
    for (const Example *example : examples) {
      texts.push_back(&example->tokens);
    }
    inputs[0] = prefix_.hidden(texts, inputs[0].shape.at(0), inputs[0].shape.at(1), *upcoming_);
  }
  std::vector<Tensor> outputs = invoke(step, lr, std::move(inputs), secret);
  program_seconds_ += seconds_since(began);
  return outputs;
}

std::vector<Tensor> Trainer::invoke(size_t step, float lr, std::vector<Tensor> inputs,
                                    const std::vector<Tensor> &secret) {
  inputs.push_back(plan_.seeds_of(step));
  inputs.push_back(scalar(lr));
  inputs.push_back(scalar(static_cast<float>(plan_.settings.eps)));
  inputs.insert(inputs.end(), secret.begin(), secret.end());
  return program_.call(step_method(), inputs);
}

std::string Trainer::step_method() const { return plan_.settings.width > 0 ? "suffix" : "step"; }

FrozenStates Trainer::frozen_states(const std::string &split) {
  if (plan_.settings.width == 0 || !program_.has(SCORE_SUFFIX)) {
    return {};
  }
  size_t tokens = 0;
  for (const Example &example : plan_.examples) {
    tokens += example.tokens.size();
  }
  tokens = std::min(tokens, plan_.order.size() * static_cast<size_t>(plan_.settings.length));
  if (split == "test") {
    for (const ScoreBatch &batch : plan_.validation) {
      tokens += batch.inputs.at(0).count();
    }
  }
  return {&prefix_, prefix_.state_bytes(tokens)};
}

void Trainer::evaluate(const std::string &split, const std::vector<ScoreBatch> &batches, int64_t best) {
  if (batches.empty() || recorded(split, best)) {
    return;
  }
  report_progress("evaluating");
  Clock::time_point reported = Clock::now();
  const auto look = [this, &reported] {
    pulse();
    if (seconds_since(reported) > REPORT_SECONDS) { // a long split must not look like a runner that hangs
      report_progress("evaluating");
      reported = Clock::now();
    }
  };
  const Measured measured = measure(program_, batches, look, frozen_states(split));
  ledger_.append(Evaluation{best < 0 ? static_cast<int64_t>(ledger_.steps()) : best, split, measured.correct,
                            measured.total, measured.loss, best < 0 ? "current" : "best"});
  report_progress("evaluating");
}

bool Trainer::recorded(const std::string &split, int64_t best) const {
  return (best < 0 ? ledger_.find(split, static_cast<int64_t>(ledger_.steps()), "current")
                   : ledger_.find(split, best, "best")) != nullptr;
}

void Trainer::conclude() {
  const auto end = static_cast<int64_t>(ledger_.steps());
  const int64_t best = plan_.uploads_last ? end : ledger_.best()->step;
  const std::vector<float> last = current();
  if (best != end) {
    restore(static_cast<size_t>(best));
  }
  const std::vector<float> chosen = current();
  if (!finite(chosen)) {
    throw Diverged("training diverged: the adapter has values that are no numbers; lower lr");
  }
  write_durably(directory_ + "/last.f32", bytes_of(last));
  write_durably(directory_ + "/best.f32", bytes_of(chosen));
  evaluate("test", plan_.test, best);
}

void Trainer::pause(double seconds) {
  const Clock::time_point began = Clock::now();
  for (double left = seconds; left > 0 && !stop_(); left = seconds - seconds_since(began)) {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, SLICE)));
  }
}

void Trainer::pulse() const {
  if (stop_()) {
    throw Stopped{};
  }
}

std::string Trainer::spent() const {
  return "{\"train_seconds\": " + number(train_seconds_) +
         ", \"program_seconds\": " + number(program_seconds_) + ", \"seconds\": " + number(seconds_since(began_)) +
         ", \"load_seconds\": " + number(program_.load_seconds()) + ", \"peak_rss_bytes\": " + std::to_string(peak_rss_bytes()) + "}";
}

void Trainer::report_progress(const std::string &phase, float lr) const {
  std::string line = "{\"progress\": {\"phase\": " + quoted(phase) + ", \"step\": " + std::to_string(ledger_.steps()) +
                     ", \"steps\": " + std::to_string(plan_.settings.steps) +
                     ", \"rss_bytes\": " + std::to_string(rss_bytes());
  if (!step_seconds_.empty()) {
    const double mean = std::accumulate(step_seconds_.begin(), step_seconds_.end(), 0.0) /
                        static_cast<double>(step_seconds_.size());
    const auto left = static_cast<double>(plan_.settings.steps - static_cast<int64_t>(ledger_.steps()));
    line += (plan_.secret ? "" : ", \"loss\": " + number(loss_)) +
            ", \"examples_per_second\": " + number(static_cast<double>(plan_.settings.batch) / mean) +
            ", \"seconds_left\": " + number(mean * (1 + ledger_.limits().rest) * left);
  }
  if (lr != 0) {
    line += ", \"lr\": " + number(static_cast<double>(lr));
  }
  const auto latest = std::find_if(ledger_.evaluations().rbegin(), ledger_.evaluations().rend(),
                                   [](const Evaluation &evaluation) { return evaluation.split == "validation"; });
  if (latest != ledger_.evaluations().rend()) {
    line += ", \"accuracy\": " + number(latest->accuracy()) +
            ", \"best_accuracy\": " + number(ledger_.best()->accuracy()) +
            ", \"validation_loss\": " + number(latest->loss);
  }
  print_line(line + "}, \"spent\": " + spent() + "}");
}

} // namespace mobizo
