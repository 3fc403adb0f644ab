# SGLang's own image with sage-sched beside it, as a user without privileges:
#   docker build -t sage-sched . && docker run --gpus all --shm-size 16g -p 30000:30000 sage-sched --model-path MODEL --host 0.0.0.0
ARG SGLANG_RELEASE=0.5.23
FROM lmsysorg/sglang:v${SGLANG_RELEASE}

# Nothing that the image has is replaced by another version.
COPY . /tmp/sage-sched
RUN python3 -m pip freeze --all --exclude-editable | grep == > /tmp/image.txt \
 && python3 -m pip install --no-cache-dir --constraint /tmp/image.txt /tmp/sage-sched \
 && rm -r /tmp/sage-sched /tmp/image.txt

RUN useradd --create-home --shell /usr/sbin/nologin sage \
 && install --directory --owner sage --group sage /home/sage/.cache
USER sage
WORKDIR /home/sage
# What the server learns, and the model cache, if they are to stay.
VOLUME /home/sage/.cache
ENV HF_HOME=/home/sage/.cache/huggingface
EXPOSE 30000
ENTRYPOINT ["sage-sched", "serve"]
