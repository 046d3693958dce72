{{/* Who is at the other end, as network policies name it. */}}

{{/* The pods of a learner, of this release or of another one: list ROOT NAME */}}
{{- define "sottovoce.peers" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- if hasKey $root.Values.learners $name -}}
- podSelector:
    matchLabels: {{- include "sottovoce.selector" (list $root "learner" $name) | nindent 6 }}
{{- else if hasKey $root.Values.elsewhere $name -}}
{{ toYaml (index $root.Values.elsewhere $name).peers }}
{{- else -}}
{{- fail (printf "edges name %s, which is neither in learners nor in elsewhere" $name) -}}
{{- end -}}
{{- end -}}

{{/* The pod of the coordinator or the eavesdropper, of this release or of another one: list ROOT ROLE */}}
{{- define "sottovoce.peersOf" -}}
{{- with (index (index . 0).Values (index . 1)).elsewhere.peers -}}
{{ toYaml . }}
{{- else -}}
- podSelector:
    matchLabels: {{- include "sottovoce.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{/* The component whose pods serve relays. */}}
{{- define "sottovoce.relayComponent" -}}
{{- if include "sottovoce.relayed" . -}}relays{{- else -}}eavesdropper{{- end -}}
{{- end -}}

{{/* The pods that serve relays, of this release or of another one. */}}
{{- define "sottovoce.relayPeers" -}}
{{- if include "sottovoce.relayed" . -}}
- podSelector:
    matchLabels: {{- include "sottovoce.selector" (list . "relays") | nindent 6 }}
{{- else -}}
{{- include "sottovoce.peersOf" (list . "eavesdropper") -}}
{{- end -}}
{{- end -}}

{{/* Pods of operators. */}}
{{- define "sottovoce.operators" -}}
- podSelector:
    matchLabels:
      sottovoce/operates: {{ .Release.Name }}
{{- with .Values.operators }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All learners that this release knows, but those of others are its neighbours alone. */}}
{{- define "sottovoce.everyLearner" -}}
- podSelector:
    matchLabels: {{- include "sottovoce.selector" (list . "learner") | nindent 6 }}
{{- range $name := keys .Values.elsewhere | sortAlpha }}
{{ include "sottovoce.peers" (list $ $name) }}
{{- end }}
{{- end -}}

{{/* Ports of an eavesdropper's relays. */}}
{{- define "sottovoce.relays" -}}
- protocol: TCP
  port: {{ .Values.eavesdropper.ports.first }}
  endPort: {{ .Values.eavesdropper.ports.last }}
{{- end -}}

{{/* Port at which a learner is called: list ROOT NAME */}}
{{- define "sottovoce.port" -}}
{{- (index (index . 0).Values.elsewhere (index . 1) | default dict).port | default 7401 -}}
{{- end -}}

{{/* Of each learner of this release who opens a stream to it and to whom it opens one, as JSON: {NAME: {callers, callees}} */}}
{{- define "sottovoce.calls" -}}
{{- $calls := dict -}}
{{- range $name := keys .Values.learners -}}
{{- $callers := list -}}{{- $callees := list -}}
{{- range $edge := $.Values.edges -}}
{{- if eq (last $edge) $name -}}{{- $callers = append $callers (first $edge) -}}{{- end -}}
{{- if eq (first $edge) $name -}}{{- $callees = append $callees (last $edge) -}}{{- end -}}
{{- end -}}
{{- $_ := set $calls $name (dict "callers" $callers "callees" $callees) -}}
{{- end -}}
{{- toJson $calls -}}
{{- end -}}
