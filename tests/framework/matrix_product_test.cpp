#include "framework/matrix_product.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/formula.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using testing::fixed;

at::Tensor here(const at::Tensor& x) { return x.to(testing::device_of_tests()); }

struct Expected {
  at::Tensor exact;
  double bar;
};

/// Sums of k products in fp32, in any order, are that near: k roundings of what the magnitudes sum up to.
Expected product_of(const at::Tensor& a, const at::Tensor& b) {
  const auto wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
  const double largest = at::mm(wide_a.abs(), wide_b.abs()).max().item<double>();
  return {at::mm(wide_a, wide_b), 6e-8 * static_cast<double>(a.size(1) + 2) * largest};
}

void expect_near(const at::Tensor& got, const Expected& expected) {
  EXPECT_LE((got.cpu().to(at::kDouble) - expected.exact).abs().max().item<double>(), expected.bar) << got.sizes();
}

TEST(MatrixProduct, OfAnyStridesIsTheFormula) {
  for (const auto& [n, k, m] : {std::tuple{7L, 5L, 3L},
                                {128L, 96L, 160L},
                                {1L, 1500L, 1001L},
                                {300L, 257L, 1L},
                                {75L, 1031L, 33L},
                                {3L, 300L, 64L},
                                {1200L, 130L, 1000L}}) {
    const auto a = fixed({n, k}, 1).cpu(), b = fixed({k, m}, 2).cpu(), c = fixed({n, m}, 3).cpu();
    const auto expected = product_of(a, b);
    const auto transposed = [](const at::Tensor& x) { return here(x.t().contiguous()).t(); };
    const auto part = [](const at::Tensor& x) {  // of a wider matrix
      const auto wide = at::zeros({x.size(0), x.size(1) + 3}, here(x).options());
      const auto inside = wide.narrow(1, 2, x.size(1));
      return inside.copy_(x);
    };
    expect_near(matrix_product(here(a), here(b)), expected);
    expect_near(matrix_product(transposed(a), transposed(b)), expected);
    expect_near(matrix_product(part(a), transposed(b)), expected);
    expect_near(matrix_product(transposed(a), part(b)), expected);
    const auto sum = here(c);
    expect_near(matrix_product(sum, -0.5, here(a), here(b), 2),
                {2 * expected.exact - 0.5 * c.to(at::kDouble), 2 * expected.bar + 1e-6});
    EXPECT_TRUE(sum.cpu().equal(c)) << "c stays";
  }
}

TEST(MatrixProduct, OfNothing) {
  const auto none = here(at::zeros({0, 1500})), some = here(at::ones({1500, 1500}));
  EXPECT_EQ(matrix_product(none, some).sizes(), (at::IntArrayRef{0, 1500}));
  EXPECT_EQ(matrix_product(some.narrow(1, 0, 0), none.narrow(1, 0, 1000)).abs().sum().item<float>(), 0);
}

TEST(MatrixProduct, OtherDtypesAreLibTorchs) {
  const auto a = here(fixed({160, 160}, 1)).to(at::kDouble);
  EXPECT_FALSE(has_own_products(a));
  EXPECT_TRUE(matrix_product(a, a).equal(at::mm(a, a)));
}

std::atomic<uintptr_t> stack_begin, stack_end;
std::atomic<int> on_stack, off_stack;

void note_stack_pointer(int, siginfo_t*, void* context) {
  const auto pointer = static_cast<uintptr_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP]);
  ++(stack_begin <= pointer && pointer < stack_end ? on_stack : off_stack);
}

/// A signal each 20 microseconds to this thread, whose handler has a stack of its own and looks where the thread's
/// stack register points.
class SignalStorm {
 public:
  SignalStorm() : room_(1 << 18) {
    pthread_attr_t attributes;
    void* begin = nullptr;
    size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin, &bytes);
    pthread_attr_destroy(&attributes);
    stack_begin = reinterpret_cast<uintptr_t>(begin);
    stack_end = stack_begin + bytes;
    on_stack = off_stack = 0;
    stack_t own{};
    own.ss_sp = room_.data();
    own.ss_size = room_.size();
    sigaltstack(&own, &stack_before_);
    struct sigaction action {};
    action.sa_sigaction = note_stack_pointer;
    action.sa_flags = SA_ONSTACK | SA_SIGINFO | SA_RESTART;
    sigaction(SIGUSR2, &action, &action_before_);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGUSR2;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    timer_create(CLOCK_MONOTONIC, &event, &timer_);
    const itimerspec period{{0, 20'000}, {0, 20'000}};
    timer_settime(timer_, 0, &period, nullptr);
  }
  ~SignalStorm() {
    timer_delete(timer_);
    sigaction(SIGUSR2, &action_before_, nullptr);
    sigaltstack(&stack_before_, nullptr);
  }
  SignalStorm(const SignalStorm&) = delete;
  SignalStorm& operator=(const SignalStorm&) = delete;

 private:
  std::vector<char> room_;
  stack_t stack_before_{};
  struct sigaction action_before_ {};
  timer_t timer_{};
};

/// On an EPYC with AVX-512 most of these products met signals in the heap while oneDNN computed them unguarded.
TEST(MatrixProduct, NoSignalMeetsItOffTheStack) {
  MEGASHARD_NOT_ON_SIM("of the CPU's products");
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  {
    const SignalStorm storm;
    for (const int64_t rows : {8, 64, 256}) {
      for (const int64_t inner : {128, 256}) {
        for (const int64_t columns : {1024, 2048}) {
          const auto a = at::ones({rows, inner}), b = at::ones({inner, columns});
          const auto transposed = at::ones({inner, rows}).t(), tall = at::ones({inner, 3 * rows}).t();
          auto sum = at::zeros({rows, columns});
          for (int repeat = 0; repeat < 5; ++repeat) {
            matrix_product_into(sum, a, b);
            add_matrix_product_(sum, transposed, b);
            matrix_product(tall, b.narrow(1, 0, 128).contiguous());
          }
          EXPECT_EQ(off_stack.exchange(0), 0) << rows << " x " << inner << " x " << columns;
          EXPECT_EQ(sum.min().item<float>(), 2.0F * static_cast<float>(inner));
        }
      }
    }
  }
  at::set_num_threads(threads);
  EXPECT_GT(on_stack, 0) << "the storm did not blow";
}

/// Of this process's threads.
int threads_that_block(int signal) {
  int blocked = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(thread.path() / "status");
    for (std::string word; status >> word;) {
      if (word != "SigBlk:" || !(status >> word)) continue;
      blocked += static_cast<int>(std::stoull(word, nullptr, 16) >> (signal - 1) & 1);
    }
  }
  return blocked;
}

TEST(MatrixProduct, ThreadsThatWorkForItTakeNoSignals) {
  MEGASHARD_NOT_ON_SIM("of the CPU's products");
  const auto a = at::ones({640, 640});
  if (!has_own_products(a)) GTEST_SKIP() << "not run: products are LibTorch's own on this CPU";
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  matrix_product(a, a);
  at::set_num_threads(threads);
  EXPECT_EQ(threads_that_block(SIGUSR2), 2);
}

}  // namespace
}  // namespace megashard
