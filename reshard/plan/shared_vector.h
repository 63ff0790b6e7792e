// What is filled once and then copied often: copies share it until one of them is changed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace ptc {

/// Threads: as a std::vector.
template <class T>
class SharedVector {
 public:
  SharedVector() = default;
  SharedVector(std::vector<T> elements)
      : elements_(std::make_shared<std::vector<T>>(std::move(elements))) {}
  SharedVector(std::initializer_list<T> elements) : SharedVector(std::vector<T>(elements)) {}

  size_t size() const { return elements_ != nullptr ? elements_->size() : 0; }
  bool empty() const { return size() == 0; }
  const T* begin() const { return elements_ != nullptr ? elements_->data() : nullptr; }
  const T* end() const { return begin() + size(); }
  const T& operator[](size_t i) const { return (*elements_)[i]; }
  const T& front() const { return elements_->front(); }
  const T& back() const { return elements_->back(); }

  void push_back(T element) { own().push_back(std::move(element)); }
  void clear() { elements_.reset(); }
  /// To be changed: this one's alone.
  std::vector<T>& own() {
    if (elements_ == nullptr) elements_ = std::make_shared<std::vector<T>>();
    if (elements_.use_count() > 1) elements_ = std::make_shared<std::vector<T>>(*elements_);
    return *elements_;
  }

  friend bool operator==(const SharedVector& a, const SharedVector& b) {
    return a.elements_ == b.elements_ || std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::shared_ptr<std::vector<T>> elements_;
};

}  // namespace ptc
